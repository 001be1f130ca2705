"""This file is the linear maps of the lean forward: dense, or int8 with a scale for each weight row and each token."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from verify_service.engine import Unsupported

Linear = Callable[[Tensor], Tensor]

# Without VNNI a CPU adds pairs of products in 16 bits, which saturate unless weights have one bit less.
_LARGEST_WEIGHT = 127 if torch.cpu._is_vnni_supported() else 63
_LARGEST_ACTIVATION = 127
_LARGEST_EMBEDDING = 127
_REST_FACTOR = 2 * _LARGEST_ACTIVATION  # what rounding takes from a share is at most one over this
_ZERO_POINT = 128  # the kernel's activations are unsigned
_SMALLEST_SCALE = 1e-30  # of a row of zeros
_ROWS_AT_ONCE = 4096
_KERNEL = "fbgemm"


class DenseLinear:
    """Rows [rows, inputs] times a copy of the weight [outputs, inputs], plus a bias [outputs] if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.clone()
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self._weight, self._bias)


class Int8Linear:
    """Rows float32 [rows, inputs] times a weight in int8, one scale for each output and one for each row.

    The sums are exact, and no row's scale depends on another row: a row's result is the same bits alone and in any batch.
    Raises Unsupported where there is no kernel for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _pack(weight)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(-1, keepdim=True).clamp_min_(_SMALLEST_SCALE)
        outputs = self._product(rows / scales).mul_(scales)
        return outputs if self._bias is None else outputs.add_(self._bias)

    def _product(self, shares: Tensor) -> Tensor:
        """Rows whose entries are from -1 to 1 times the weight, in multiples of one over the largest activation."""
        outputs: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            shares, 1.0 / _LARGEST_ACTIVATION, _ZERO_POINT, self._packed
        )
        return outputs


class FineInt8Linear(Int8Linear):
    """The same with activations in two parts, the second what rounding took from the first: 16 bits for twice the products.

    For maps whose inputs have a few huge entries, beside which the others would vanish.
    """

    def __call__(self, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(-1, keepdim=True).clamp_min_(_SMALLEST_SCALE)
        shares = rows / scales
        coarse = (shares * _LARGEST_ACTIVATION).round_().div_(_LARGEST_ACTIVATION)
        parts = self._product(torch.cat((coarse, (shares - coarse).mul_(_REST_FACTOR))))
        outputs = parts[len(rows) :].div_(_REST_FACTOR).add_(parts[: len(rows)]).mul_(scales)
        return outputs if self._bias is None else outputs.add_(self._bias)


class DenseEmbedding:
    """Rows of a copy of a table [vocabulary, hidden]."""

    def __init__(self, table: Tensor) -> None:
        self._table = table.clone()

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._table[token_ids]


class Int8Embedding:
    """Rows of a table in int8, one scale for each token; float32 [rows, hidden]."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._scales = _rounded(table, _LARGEST_EMBEDDING)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._table[token_ids] * self._scales[token_ids]


class _Rounded(NamedTuple):
    """Integers int8 [rows, columns] and what each row's stand for, float32 [rows, 1]."""

    integers: Tensor
    scales: Tensor


def _rounded(weight: Tensor, largest: int) -> _Rounded:
    """A weight in integers up to `largest`, row by row; in parts, since a copy of a vocabulary's rows is large."""
    scales = torch.maximum(weight.amax(-1, keepdim=True), -weight.amin(-1, keepdim=True)).float()
    scales = scales.clamp_min_(_SMALLEST_SCALE).div_(largest)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    for part in torch.split(torch.arange(len(weight)), _ROWS_AT_ONCE):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        integers[rows] = (weight[rows].float() / scales[rows]).round_()
    return _Rounded(integers, scales)


def _pack(weight: Tensor) -> Any:
    """The kernel's own form of a weight, rounded to int8 by rows."""
    if _KERNEL not in torch.backends.quantized.supported_engines:
        raise Unsupported(f"int8 needs PyTorch's {_KERNEL} kernels, which there are on x86 CPUs only")
    rounded, scales = _rounded(weight, _LARGEST_WEIGHT)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    previous, torch.backends.quantized.engine = torch.backends.quantized.engine, _KERNEL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the type goes some day; the version is pinned
            quantised = torch._make_per_channel_quantized_tensor(rounded, scales[:, 0].double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = previous
