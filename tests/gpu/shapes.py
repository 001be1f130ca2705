"""This file is models of random weights in the shapes of real ones, made where they are used: nothing is fetched or stored."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151936,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "small": {
        **_QWEN3,
        "vocab_size": 997,
        "hidden_size": 64,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}


class RandomWeights:
    """`verify_service.engines.transformers.checkpoint.Weights` of a shape, each tensor drawn from its name, on a device."""

    def __init__(self, config: Mapping[str, Any], device: str, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias")

    def shape(self, name: str) -> tuple[int, ...]:
        """As a checkpoint of the model has it."""
        config = self._config
        hidden, size = config["hidden_size"], config["head_dim"]
        shapes = {
            "q_proj": (config["num_attention_heads"] * size, hidden),
            "k_proj": (config["num_key_value_heads"] * size, hidden),
            "v_proj": (config["num_key_value_heads"] * size, hidden),
            "o_proj": (hidden, config["num_attention_heads"] * size),
            "gate_proj": (config["intermediate_size"], hidden),
            "up_proj": (config["intermediate_size"], hidden),
            "down_proj": (hidden, config["intermediate_size"]),
            "q_norm": (size,),
            "k_norm": (size,),
            "embed_tokens": (config["vocab_size"], hidden),
            "lm_head": (config["vocab_size"], hidden),
        }
        return shapes.get(name.split(".")[-2], (hidden,))

    def tensor(self, name: str) -> Tensor:
        """Norms of one, and maps that keep the size of what they map."""
        shape = self.shape(name)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return drawn.mul_(shape[1] ** -0.5)

    def part(self, name: str, span: slice, *, dim: int = 0) -> Tensor:
        """A span of the same tensor."""
        return self.tensor(name)[span] if dim == 0 else self.tensor(name)[:, span]
