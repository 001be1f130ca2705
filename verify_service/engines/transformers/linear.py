"""This file is the linear maps of the lean forward: dense, or int8 with a scale for each weight row and each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from treewire.int8 import LARGEST_ACTIVATION, SMALLEST_SCALE, Int8Linear, rounded

Linear = Callable[[Tensor], Tensor]

_LARGEST_EMBEDDING = 127
_REST_FACTOR = 2 * LARGEST_ACTIVATION  # what rounding takes from a share is at most one over this


class DenseLinear:
    """Rows [rows, inputs] times a copy of the weight [outputs, inputs], plus a bias [outputs] if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.clone()
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self._weight, self._bias)


class FineInt8Linear(Int8Linear):
    """The same with activations in two parts, the second what rounding took from the first: 16 bits for twice the products.

    For maps whose inputs have a few huge entries, beside which the others would vanish.
    """

    def __call__(self, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_SCALE)
        shares = rows / scales
        coarse = (shares * LARGEST_ACTIVATION).round_().div_(LARGEST_ACTIVATION)
        parts = self.product(torch.cat((coarse, (shares - coarse).mul_(_REST_FACTOR))))
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
        self._table, self._scales = rounded(table, _LARGEST_EMBEDDING)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._table[token_ids] * self._scales[token_ids]
