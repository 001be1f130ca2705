"""This file is what the lean forward must know of a model, read from its configuration, and which models it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_service.engine import Unsupported

_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with rotary embeddings, grouped queries and a gated SiLU, as Llama, Qwen2 and Qwen3 are."""

    model_type: str
    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    max_context: int
    tied_head: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a config.json. Raises Unsupported with the reason if the lean forward would not compute this model."""
        _refuse_unknown(config)
        rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        num_heads = config["num_attention_heads"]
        return cls(
            model_type=config["model_type"],
            vocabulary_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            norm_epsilon=config["rms_norm_eps"],
            max_context=config["max_position_embeddings"],
            tied_head=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA),
            rope_scaling=rope if _rope_type(rope) == "llama3" else {},
        )

    @property
    def rotary_frequencies(self) -> Tensor:
        """Angle per position of each pair of a head, float32 [head size / 2]. Llama 3 stretches the slow ones."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        frequencies = 1.0 / (self.rope_theta**exponents)
        return _stretched(frequencies, self.rope_scaling) if self.rope_scaling else frequencies


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise Unsupported(f"the lean forward computes {', '.join(sorted(_MODEL_TYPES))}, not {model_type}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    reasons = {
        f"rotary embeddings of type {_rope_type(rope)}": _rope_type(rope) not in ("default", "llama3"),
        "sliding windows": bool(config.get("use_sliding_window"))
        or any(kind != "full_attention" for kind in config.get("layer_types") or ()),
        f"the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "quantised weights": "quantization_config" in config,
        "more than one tensor-parallel shard of the pretraining": config.get("pretraining_tp", 1) != 1,
    }
    asked = [reason for reason, holds in reasons.items() if holds]
    if asked:
        raise Unsupported(f"this {model_type} model has {', '.join(asked)}, which the lean forward does not compute")


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _stretched(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rotary frequencies: wavelengths beyond the original context are divided by the factor, with a ramp."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: Tensor = frequencies * (ramp + (1.0 - ramp) / factor)
    return stretched
