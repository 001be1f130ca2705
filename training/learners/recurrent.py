"""This file is how a recurrent drafter learns: its first guess at every position, then its own outputs read back in chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from draft_service.engines.recurrent.model import AttentionInputs, RecurrentDrafter
from training.batches import Batch
from training.learners.learned import Learned, generated_positions, spread_anchors
from training.objective import depth_weight, distil, soft_targets


@dataclass(frozen=True)
class RecurrentObjective:
    """What the loss of a recurrent drafter counts.

    `num_steps` guesses deep, the ones past the first at `chains_per_sequence` positions only; `decay` of `depth_weight`;
    `hard_share` of `soft_targets`.
    """

    num_steps: int = 4
    chains_per_sequence: int = 48
    decay: float = 4.0
    hard_share: float = 0.5


class _Step(NamedTuple):
    """The outputs [batch, anchors, hidden] of a depth, with the keys and values of its rows."""

    outputs: Tensor
    inputs: AttentionInputs


def learn(drafter: RecurrentDrafter, batch: Batch, objective: RecurrentObjective, generator: torch.Generator) -> Learned:
    """The loss of one batch."""
    generated = generated_positions(batch)
    targets = soft_targets(batch.final[generated], drafter.candidate_head, objective.hard_share)
    target_rows = torch.full(generated.shape, -1).masked_scatter_(generated, torch.arange(len(targets)))
    first = first_step(drafter, batch.token_ids, batch.taps)
    distillations = [
        distil(drafter.head_inputs(first.outputs[generated]), drafter.candidate_head, targets, torch.ones(len(targets)))
    ]
    anchors = spread_anchors(batch, objective.chains_per_sequence, generator)
    weight = len(targets) / anchors.numel()
    for depth, outputs in enumerate(chain_outputs(drafter, batch.token_ids, first, anchors, objective.num_steps), start=2):
        rows = target_rows.gather(1, (anchors + depth - 1).clamp(max=target_rows.shape[1] - 1))
        valid = rows >= 0
        weights = torch.full((int(valid.sum()),), weight * depth_weight(depth, objective.decay))
        distillations.append(distil(drafter.head_inputs(outputs[valid]), drafter.candidate_head, targets[rows[valid]], weights))
    loss = torch.stack([distillation.loss for distillation in distillations]).sum() / len(targets)
    return Learned(loss, [float(distillation.agreed.float().mean()) for distillation in distillations])


def first_step(drafter: RecurrentDrafter, token_ids: Tensor, taps: Tensor) -> _Step:
    """The outputs of every position of whole sequences [batch, positions], from true features."""
    features = drafter.features(taps.float())
    preceding = functional.pad(features[:, :-1], (0, 0, 1, 0))
    rows = drafter.rows(token_ids, preceding)
    inputs = drafter.attention_inputs(rows, torch.arange(token_ids.shape[1]))
    queries, keys, values = (part.transpose(1, 2) for part in _by_query_head(inputs))
    attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return _Step(drafter.finish(rows, attended.transpose(1, 2)), inputs)


def chain_outputs(drafter: RecurrentDrafter, token_ids: Tensor, first: _Step, anchors: Tensor, num_steps: int) -> list[Tensor]:
    """Outputs [batch, anchors, hidden] of depths 2 .. num_steps of chains that follow the sequences' own tokens."""
    outputs, previous, own = [], _gather(first.outputs, anchors), []
    context = _by_query_head(first.inputs)
    for step in range(1, num_steps):
        tokens = token_ids.gather(1, (anchors + step).clamp(max=token_ids.shape[1] - 1))
        rows = drafter.rows(tokens, drafter.carried(previous))
        inputs = _by_query_head(drafter.attention_inputs(rows, anchors + step))
        own.append(inputs)
        previous = drafter.finish(rows, attend_chain(inputs.queries, context, own, anchors))
        outputs.append(previous)
    return outputs


def attend_chain(queries: Tensor, context: AttentionInputs, own: list[AttentionInputs], anchors: Tensor) -> Tensor:
    """Attention of chain rows: queries [batch, anchors, heads, D] see the committed positions up to their anchor, int64
    [batch, anchors], and the rows of their own chain. `context` is [batch, positions, heads, D]."""
    scale = queries.shape[-1] ** -0.5
    scores = torch.einsum("bahd,bphd->bhap", queries, context.keys).float() * scale
    hidden = torch.arange(context.keys.shape[1]) > anchors[..., None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    own_scores = torch.stack([(queries * step.keys).sum(-1) for step in own], dim=-1).transpose(1, 2).float() * scale
    shares = torch.cat([scores, own_scores], dim=-1).softmax(-1).to(queries.dtype)
    length = context.keys.shape[1]
    attended = torch.einsum("bhap,bphd->bahd", shares[..., :length], context.values)
    for index, step in enumerate(own):
        attended = attended + shares[..., length + index].transpose(1, 2)[..., None] * step.values
    return attended


def _by_query_head(inputs: AttentionInputs) -> AttentionInputs:
    """The same with keys and values repeated for each query head."""
    repeats = inputs.queries.shape[-2] // inputs.keys.shape[-2]
    return AttentionInputs(
        inputs.queries, inputs.keys.repeat_interleave(repeats, dim=-2), inputs.values.repeat_interleave(repeats, dim=-2)
    )


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    return rows.gather(1, positions[..., None].expand(-1, -1, rows.shape[-1]))
