"""This file is a step's work as what runs the model sees it: one part for each session, with nothing of the sessions' state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treewire.core.history import NodeHistories
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.kv.rows import Slots
from verify_service.attention.layout import Segment
from verify_service.engine import Masks, SessionId
from verify_service.engines.transformers.segments import chain_segment, tree_segment


@dataclass(frozen=True, eq=False)
class Part:
    """One session's tokens in a step: a chunk of its prompt, or a tree.

    `context_slots` hold the committed prefix in order of position, the tokens' own rows go to `slots`. The target chooses
    after the last `num_choices` tokens; `histories` is what was said before each choice, where sampling reads it. `masks` are
    waited for when it chooses.
    """

    session: SessionId
    token_ids: tuple[int, ...]
    context_slots: Slots
    slots: Slots
    tree: DraftTree | None
    num_choices: int
    sampling: Sampling
    histories: NodeHistories | None
    num_node_probabilities: int
    wants_features: bool
    masks: Masks | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def num_tapped(self) -> int:
        """Rows whose context features are wanted: all or none."""
        return len(self) if self.wants_features else 0

    @property
    def chosen_positions(self) -> list[int]:
        """The positions of the tokens that are chosen: one after each node, or after the last token of a chunk."""
        start = len(self.context_slots)
        if self.tree is not None:
            return [start + depth + 1 for depth in self.tree.depths]
        return [start + len(self)] * self.num_choices

    def segment(self, device: torch.device) -> Segment:
        """The part's rows in a step."""
        if self.tree is None:
            return chain_segment(self.context_slots, self.slots, device)
        return tree_segment(self.context_slots, self.slots, self.tree, device)
