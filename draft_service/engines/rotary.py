"""This file is rotary position embedding, in the pairing of Llama and Qwen, for drafters on torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Frequencies that depend on the longest sequence of a batch: a row would depend on its neighbours.
_BATCH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class Rotary:
    """`frequencies` float32 [D / 2] in radians a position; heads are multiplied by `scale` as they are turned."""

    frequencies: Tensor
    scale: float = 1.0

    @classmethod
    def plain(cls, head_dim: int, theta: float) -> Rotary:
        """Frequencies falling from 1 to almost 1 / theta."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return cls(torch.exp(-math.log(theta) * exponents))

    @classmethod
    def scaled(cls, head_dim: int, parameters: Mapping[str, Any]) -> Rotary:
        """Of a config's `rope_parameters`, with `max_position_embeddings` beside them: YaRN, Llama 3, linear.

        Raises ValueError for a kind that depends on the length of a sequence, or that transformers does not know.
        """
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = parameters["rope_type"]
        if kind in _BATCH_DEPENDENT or kind not in ROPE_INIT_FUNCTIONS:
            known = sorted(set(ROPE_INIT_FUNCTIONS) - set(_BATCH_DEPENDENT))
            raise ValueError(f"rotary scaling is {kind!r}, drafters have one of {', '.join(known)}")
        rope = {name: value for name, value in parameters.items() if name not in ("type", "max_position_embeddings")}
        longest = parameters.get("max_position_embeddings")
        config = LlamaConfig(
            head_dim=head_dim, rope_parameters=rope, **({"max_position_embeddings": longest} if longest else {})
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return cls(frequencies.float(), float(scale))

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [..., heads, D] turned to positions [...], in pairs (i, i + D / 2)."""
        angles = positions.float()[..., None, None] * self.frequencies.to(positions.device)
        cosines, sines = ((part * self.scale).to(heads.dtype) for part in (angles.cos(), angles.sin()))
        first, second = heads.chunk(2, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
