"""This file is what a drafter learns from: the target's own distributions over the candidates, deeper guesses counting less."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_service.engines.precision import product_dtype

ROWS_AT_ONCE = 512


class Distillation(NamedTuple):
    """Summed weighted loss, and whether each row's best candidate is the target's, bool [rows]."""

    loss: Tensor
    agreed: Tensor


def depth_weight(depth: int, decay: float) -> float:
    """Weight of a guess at this depth, 1 at depth 1: exp(-(depth - 1) / decay), as in DFlash, arXiv 2602.06036."""
    return math.exp(-(depth - 1) / decay)


@torch.no_grad()
def soft_targets(final: Tensor, candidate_head: Tensor, hard_share: float) -> Tensor:
    """What each row should say, bfloat16 [rows, candidates], from the target's final hidden states [rows, hidden].

    The target's distribution over the candidates, mixed with `hard_share` of its argmax, which is what a greedy target says.
    """
    head, targets = candidate_head.to(product_dtype()), []
    for rows in torch.split(final, ROWS_AT_ONCE):
        probabilities = (rows.to(head.dtype) @ head.T).float().softmax(-1).mul_(1 - hard_share)
        best = probabilities.argmax(-1, keepdim=True)
        targets.append(probabilities.scatter_add_(1, best, torch.full_like(probabilities[:, :1], hard_share)).bfloat16())
    return torch.cat(targets)


def distil(head_inputs: Tensor, candidate_head: Tensor, targets: Tensor, weights: Tensor) -> Distillation:
    """Cross-entropy of the drafter's distribution against `targets` [rows, candidates], weighted by row and summed.

    The logits exist for a few rows at a time: their gradient is taken on the way, and only that of the rows is kept.
    """
    loss, agreed = _Distil.apply(head_inputs, candidate_head, targets, weights)  # type: ignore[no-untyped-call]
    return Distillation(loss, agreed)


class _Distil(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, head_inputs: Tensor, candidate_head: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = candidate_head.to(product_dtype())
        gradient, agreed, total = torch.empty_like(head_inputs), [], torch.zeros(())
        for start in range(0, len(head_inputs), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            wanted, weight = targets[part].float(), weights[part]
            logits = (head_inputs[part].to(head.dtype) @ head.T).float()
            agreed.append(logits.argmax(-1) == wanted.argmax(-1))
            normaliser = logits.logsumexp(-1)
            total += (weight * (normaliser - (logits * wanted).sum(-1))).sum()
            slope = logits.sub_(normaliser[:, None]).exp_().sub_(wanted).mul_(weight[:, None])
            gradient[part] = slope.to(head.dtype) @ head
        context.save_for_backward(gradient)
        return total, torch.cat(agreed)

    @staticmethod
    def backward(context: Any, *output_gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * output_gradients[0], None, None, None
