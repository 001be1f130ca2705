"""This file is where a drafter starts: a decoder layer of the target, placed where its tapped hidden states would enter it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.engines.dflash.model import DFlashConfig, DFlashDrafter
from draft_service.engines.recurrent.model import RecurrentConfig, RecurrentDrafter
from training.target import Target

RESIDUAL_SCALE = 4.0
OUTPUT_SCALE = 0.25  # no certainty before anything is learnt


def recurrent_config(target: Target, tapped_layers: Sequence[int], num_candidates: int, horizon: int) -> RecurrentConfig:
    """The shape of a recurrent drafter for a target: one layer of the target's own shape."""
    config = target.model.config
    return RecurrentConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        rms_epsilon=config.rms_norm_eps,
        tapped_layers=tuple(tapped_layers),
        num_candidates=num_candidates,
        horizon=horizon,
    )


@torch.no_grad()
def block_drafter(
    target: Target, tapped_layers: Sequence[int], num_layers: int, block_size: int, mask_token_id: int
) -> DFlashDrafter:
    """A block drafter whose layers are the target's last ones, over the last tap."""
    shape = recurrent_config(target, tapped_layers, 1, block_size - 1)
    config = DFlashConfig(
        hidden_size=shape.hidden_size,
        num_layers=num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rope_theta=shape.rope_theta,
        rms_epsilon=shape.rms_epsilon,
        block_size=block_size,
        mask_token_id=mask_token_id,
        tapped_layers=shape.tapped_layers,
        normalize_taps=True,
    )
    drafter = DFlashDrafter(config, target.embedding, target.head)
    for mine, theirs in zip(drafter.draft_layers, target.model.base_model.layers[-num_layers:], strict=True):
        known = {name: weight for name, weight in theirs.state_dict().items() if name in mine.state_dict()}
        mine.load_state_dict(known, strict=False)  # queries' and keys' norms start at 1
    drafter.norm.weight.copy_(OUTPUT_SCALE * target.model.base_model.norm.weight)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    return drafter


@torch.no_grad()
def recurrent_drafter(target: Target, config: RecurrentConfig, candidate_ids: Tensor, tap_scale: float) -> RecurrentDrafter:
    """A drafter whose layer is the target's layer after the last tap, reading that tap; `tap_scale` is its root mean square.

    The layer sees its residual stream scaled to RESIDUAL_SCALE, so what it adds is scaled alike.
    """
    drafter = RecurrentDrafter(config, target.embedding, target.head, candidate_ids)
    layer = target.model.base_model.layers[min(config.tapped_layers[-1] + 1, target.num_layers - 1)]
    attention, mlp = layer.self_attn, layer.mlp
    copies = (
        (drafter.attention_norm.weight, layer.input_layernorm.weight),
        (drafter.query.weight, attention.q_proj.weight),
        (drafter.key.weight, attention.k_proj.weight),
        (drafter.value.weight, attention.v_proj.weight),
        (drafter.attention_output.weight, attention.o_proj.weight),
        (drafter.mlp_norm.weight, layer.post_attention_layernorm.weight),
        (drafter.gate.weight, mlp.gate_proj.weight),
        (drafter.up.weight, mlp.up_proj.weight),
        (drafter.down.weight, mlp.down_proj.weight),
        (drafter.output_norm.weight, target.model.base_model.norm.weight),
    )
    for mine, theirs in copies:
        mine.copy_(theirs)
    drafter.attention_output.weight.mul_(RESIDUAL_SCALE / tap_scale)
    drafter.down.weight.mul_(RESIDUAL_SCALE / tap_scale)
    drafter.output_norm.weight.mul_(OUTPUT_SCALE)
    identity = torch.eye(config.hidden_size)
    drafter.fuse.weight.zero_()
    drafter.fuse.weight[:, -config.hidden_size :] = identity
    drafter.carry.weight.copy_(RESIDUAL_SCALE * identity)
    drafter.embed.weight.copy_(RESIDUAL_SCALE / 2 * identity)
    return drafter


def likeliest_candidates(token_counts: Tensor, num_candidates: int) -> Tensor:
    """The ids of the most frequent tokens, ascending, int64; equals by the lower id."""
    order = torch.argsort(token_counts, descending=True, stable=True)
    return order[:num_candidates].sort().values
