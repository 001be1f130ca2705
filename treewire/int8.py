"""This file is int8 for matrices on x86 CPUs: weights with a scale for each row, activations with a scale for each token."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST_ACTIVATION = 127
SMALLEST_SCALE = 1e-30  # of a row of zeros

# Without VNNI a CPU adds pairs of products in 16 bits, which saturate unless weights have one bit less.
_LARGEST_WEIGHT = 127 if torch.cpu._is_vnni_supported() else 63
_ZERO_POINT = 128  # the kernel's activations are unsigned
_ROWS_AT_ONCE = 4096
_KERNEL = "fbgemm"


def has_kernel() -> bool:
    """Whether this PyTorch has the kernels, which there are on x86 CPUs only."""
    return _KERNEL in torch.backends.quantized.supported_engines


class Int8Linear:
    """Rows float32 [rows, inputs] times a weight in int8, one scale for each output and one for each row.

    The sums are exact, and no row's scale depends on another row: a row's result is the same bits alone and in any batch.
    Raises ValueError where there is no kernel for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _pack(weight)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_SCALE)
        outputs = self.product(rows / scales).mul_(scales)
        return outputs if self._bias is None else outputs.add_(self._bias)

    def product(self, shares: Tensor) -> Tensor:
        """Rows whose entries are from -1 to 1 times the weight, in multiples of one over the largest activation."""
        outputs: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            shares, 1.0 / LARGEST_ACTIVATION, _ZERO_POINT, self._packed
        )
        return outputs


class Rounded(NamedTuple):
    """Integers int8 [rows, columns] and what each row's stand for, float32 [rows, 1]."""

    integers: Tensor
    scales: Tensor


def rounded(weight: Tensor, largest: int) -> Rounded:
    """A weight in integers up to `largest`, row by row; in parts, since a copy of a vocabulary's rows is large."""
    scales = torch.maximum(weight.amax(-1, keepdim=True), -weight.amin(-1, keepdim=True)).float()
    scales = scales.clamp_min_(SMALLEST_SCALE).div_(largest)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    for part in torch.split(torch.arange(len(weight)), _ROWS_AT_ONCE):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        integers[rows] = (weight[rows].float() / scales[rows]).round_()
    return Rounded(integers, scales)


def _pack(weight: Tensor) -> Any:
    """The kernel's own form of a weight, rounded to int8 by rows."""
    if not has_kernel():
        raise ValueError(f"int8 needs PyTorch's {_KERNEL} kernels, which there are on x86 CPUs only")
    integers, scales = rounded(weight, _LARGEST_WEIGHT)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    previous, torch.backends.quantized.engine = torch.backends.quantized.engine, _KERNEL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the type goes some day; the version is pinned
            quantised = torch._make_per_channel_quantized_tensor(integers, scales[:, 0].double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = previous
