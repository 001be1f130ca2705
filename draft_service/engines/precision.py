"""This file is one question: whether bfloat16 pays on this CPU. Emulated, its matrix products are several times slower."""

from __future__ import annotations

import torch


def bfloat16_pays() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def mixed_precision() -> torch.autocast:
    """Matrix products in bfloat16 where that pays, else in float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_pays())


def product_dtype() -> torch.dtype:
    """The dtype for large matrix products that autocast does not reach."""
    return torch.bfloat16 if bfloat16_pays() else torch.float32
