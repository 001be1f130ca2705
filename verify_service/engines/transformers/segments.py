"""This file is how chunks and trees become segments of a step."""

from __future__ import annotations

import torch

from treewire.core.tree import DraftTree
from treewire.core.visibility import positions, visibility
from treewire.kv.rows import Slots
from verify_service.attention.layout import Segment


def chain_segment(context_slots: Slots, slots: Slots, device: torch.device) -> Segment:
    """The next tokens of a sequence, each seeing all before it."""
    start = len(context_slots)
    return Segment(
        context_slots=torch.from_numpy(context_slots).to(device),
        slots=torch.from_numpy(slots).to(device),
        positions=torch.arange(start, start + len(slots), device=device),
    )


def tree_segment(context_slots: Slots, slots: Slots, tree: DraftTree, device: torch.device) -> Segment:
    """A tree whose root comes after the context, each node seeing the context and its ancestors."""
    return Segment(
        context_slots=torch.from_numpy(context_slots).to(device),
        slots=torch.from_numpy(slots).to(device),
        positions=torch.from_numpy(positions(tree.depths, len(context_slots))).to(device),
        visible=torch.from_numpy(visibility(tree.parents)).to(device),
    )
