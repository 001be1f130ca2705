"""This file is how a block drafter learns: blocks at spread positions, every slot at once, from the features before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draft_service.engines.dflash.model import DFlashDrafter, DFlashLayer
from training.batches import Batch
from training.learners.learned import Learned, generated_positions, spread_anchors
from training.objective import depth_weight, distil, soft_targets


@dataclass(frozen=True)
class BlockObjective:
    """What the loss of a block drafter counts: blocks for each sequence, `decay` of `depth_weight`, `hard_share` of
    `soft_targets`, and over which tokens the distributions are compared."""

    candidate_ids: Tensor
    blocks_per_sequence: int = 16
    decay: float = 4.0
    hard_share: float = 0.5


def learn(drafter: DFlashDrafter, batch: Batch, objective: BlockObjective, generator: torch.Generator) -> Learned:
    """The loss of one batch, and the agreement of each slot."""
    head = drafter.head[objective.candidate_ids]
    generated = generated_positions(batch)
    targets = soft_targets(batch.final[generated], head, objective.hard_share)
    target_rows = torch.full(generated.shape, -1).masked_scatter_(generated, torch.arange(len(targets)))
    anchors = spread_anchors(batch, objective.blocks_per_sequence, generator)
    outputs = block_outputs(drafter, batch, anchors)
    distillations, count = [], 0
    for slot in range(1, drafter.config.block_size):
        rows = target_rows.gather(1, (anchors + slot - 1).clamp(max=generated.shape[1] - 1))
        valid = rows >= 0
        weights = torch.full((int(valid.sum()),), depth_weight(slot, objective.decay))
        distillations.append(distil(drafter.norm(outputs[:, :, slot][valid]), head, targets[rows[valid]], weights))
        count += int(valid.sum()) if slot == 1 else 0
    loss = torch.stack([distillation.loss for distillation in distillations]).sum() / count
    return Learned(loss, [float(distillation.agreed.float().mean()) for distillation in distillations])


def block_outputs(drafter: DFlashDrafter, batch: Batch, anchors: Tensor) -> Tensor:
    """The last layer's rows [batch, blocks, block, hidden] of blocks whose bonus tokens stand at `anchors` [batch, blocks]."""
    features = drafter.features(batch.taps.float())
    block = drafter.config.block_size
    positions = anchors[..., None] + torch.arange(block)
    rows, visible = drafter.block_rows(batch.token_ids.gather(1, anchors)), _visible(anchors, features.shape[1], block)
    for layer in drafter.draft_layers:
        rows = layer.finish(rows, _attend(layer, rows, positions, features, visible))
    return rows


def _attend(layer: DFlashLayer, rows: Tensor, positions: Tensor, features: Tensor, visible: Tensor) -> Tensor:
    attention, normed = layer.self_attn, layer.input_layernorm(rows)
    context = attention.keys_values(features, torch.arange(features.shape[1]))
    own = attention.keys_values(normed, positions)
    queries = attention.queries(normed, positions)
    keys, values = (
        torch.cat([known, mine.flatten(1, 2)], dim=1).transpose(1, 2) for known, mine in zip(context, own, strict=True)
    )
    attended = functional.scaled_dot_product_attention(
        queries.flatten(1, 2).transpose(1, 2), keys, values, attn_mask=visible[:, None], enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(queries.shape)


def _visible(anchors: Tensor, length: int, block: int) -> Tensor:
    """Who sees whom, bool [batch, blocks x block, length + blocks x block]: features before the anchor, and the own block."""
    before = torch.arange(length) < anchors[..., None]
    number = torch.arange(anchors.shape[1]).repeat_interleave(block)
    own = (number[:, None] == number).expand(len(anchors), -1, -1)
    return torch.cat([before.repeat_interleave(block, dim=1), own], dim=2)
