"""This file is the matrices of a drafter that drafts: read for a few rows, memory is what they wait for, so they are int8."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.engines.precision import bfloat16_pays, product_dtype
from treewire.int8 import Int8Linear, has_kernel

INT8_MAX_ROWS = 8
INT8_MULTIPLE = 32
_INT8_LARGEST = 127.0


def drafting_linear(weight: Tensor) -> nn.Module:
    """A bias-free linear [..., inputs] to [..., outputs] in int8, by the kernel that is fastest on this CPU.

    Without bfloat16 in hardware int8 products beat int8 weights. Measured on one core with AVX2 alone, 576 to 8,192: 0.4 ms
    against 1.4 for one row, 0.7 against 1.7 for four.
    """
    return WeightOnlyLinear(weight) if bfloat16_pays() or not has_kernel() else RowLinear(weight)


class RowLinear(nn.Module):
    """A bias-free linear in int8: weights with a scale for each output, rows with a scale of their own; float32 in and out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._linear = Int8Linear(weight, None)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return self._linear(rows.reshape(-1, rows.shape[-1]).float()).reshape(*rows.shape[:-1], -1)


class WeightOnlyLinear(nn.Module):
    """A bias-free linear with weights in int8, one scale for each output; rows come and go in float32.

    More than INT8_MAX_ROWS rows, for which the int8 kernel is slow, and shapes that it does not take read the same weights in
    bfloat16, or float32 where bfloat16 is emulated. Measured on one core, 576 to 8,192, one row: float32 1.8 ms, bfloat16 1.2,
    int8 0.3; on a CPU without bfloat16 2.0, 3.4 and 1.4.
    """

    quantised: Tensor
    scales: Tensor
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / _INT8_LARGEST
        quantised = (weight / scales[:, None]).round()
        self.register_buffer("quantised", quantised.to(torch.int8))
        self.register_buffer("scales", scales.bfloat16())
        self.register_buffer("weight", (quantised * scales.bfloat16().float()[:, None]).to(product_dtype()))
        self._fits_int8 = all(size % INT8_MULTIPLE == 0 for size in weight.shape)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        flat = rows.reshape(-1, rows.shape[-1]).bfloat16()
        if self._fits_int8 and len(flat) <= INT8_MAX_ROWS:
            outputs: Tensor = torch._weight_int8pack_mm(flat, self.quantised, self.scales)
        else:
            outputs = functional.linear(flat.to(self.weight.dtype), self.weight)
        return outputs.float().reshape(*rows.shape[:-1], -1)
