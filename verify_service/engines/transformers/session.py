"""This file is what the engine knows of one session, and which work it takes for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from treewire.core.acceptance import Acceptance
from treewire.core.history import History, NodeHistories
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.kv.rows import Moves, SessionRows
from verify_service.engine import PrefillChunk, Scoring, SessionId, Target
from verify_service.engines.transformers.parts import Part


@dataclass(eq=False)
class Session:
    """One generation's state in the engine. `tree` is the one that was scored and awaits its keep."""

    id: SessionId
    prompt: tuple[int, ...]
    sampling: Sampling
    num_node_probabilities: int
    rows: SessionRows
    history: History
    wants_features: bool = False
    tree: DraftTree | None = field(default=None, init=False)

    def check(self, item: PrefillChunk | Scoring, target: Target) -> None:
        """Raises ValueError, with value and limit, if this is not work that the session can take now."""
        if isinstance(item, PrefillChunk):
            self._check_chunk(item)
        else:
            self._check_tree(item.tree, target)

    def part(self, item: PrefillChunk | Scoring) -> Part:
        """The item as work of a step. A tree takes its slots from the pool here."""
        context_slots = self.rows.committed
        if isinstance(item, PrefillChunk):
            token_ids, num_choices = item.token_ids, int(item.last)
            slots = self.rows.next_slots(len(token_ids))
        else:
            self.tree = item.tree
            token_ids, num_choices = item.tree.token_ids, len(item.tree)
            slots = self.rows.take_tree_slots(num_choices)
        return Part(
            session=self.id,
            token_ids=token_ids,
            context_slots=context_slots,
            slots=slots,
            tree=self.tree,
            num_choices=num_choices,
            sampling=self.sampling,
            histories=self._histories() if num_choices else None,
            num_node_probabilities=self.num_node_probabilities,
            wants_features=self.wants_features,
            masks=item.masks if num_choices else None,
        )

    def _histories(self) -> NodeHistories | None:
        """What was said before each choice of the step, if the chain reads it: after the tree in it, else after the prompt."""
        if not self.sampling.reads_history:
            return None
        return self.history.now() if self.tree is None else self.history.over(self.tree)

    def keep(self, acceptance: Acceptance) -> Moves:
        """Of the tree keep the accepted path; what has to be moved for it.

        Raises ValueError if no tree awaits it or the nodes are no path from the root.
        """
        if self.tree is None:
            raise ValueError(f"session {self.id} has no tree to keep nodes of")
        nodes = acceptance.nodes
        if not nodes or not 0 <= nodes[-1] < len(self.tree) or nodes != self.tree.path(nodes[-1]):
            raise ValueError(
                f"session {self.id}: nodes {nodes} are no path from the root of its tree of {len(self.tree)} nodes"
            )
        token_ids = [self.tree.token_ids[node] for node in nodes]
        moves = self.rows.keep(nodes, token_ids)
        self.history.extend(token_ids)
        self.tree = None
        return moves

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        start = self.rows.num_committed
        stop = start + len(chunk.token_ids)
        if not chunk.token_ids or self.prompt[start:stop] != chunk.token_ids:
            raise ValueError(f"session {self.id}: the chunk is not the prompt's tokens from {start} to {stop}")
        if chunk.last != (stop == len(self.prompt)):
            raise ValueError(
                f"session {self.id}: a chunk up to token {stop} of a prompt of {len(self.prompt)} has last={chunk.last}"
            )

    def _check_tree(self, tree: DraftTree, target: Target) -> None:
        if not self.rows.prefill_is_complete:
            raise ValueError(
                f"session {self.id}: {self.rows.num_committed} of {len(self.prompt)} prompt tokens are prefilled, no tree yet"
            )
        if self.tree is not None:
            raise ValueError(f"session {self.id}: the last tree of {len(self.tree)} nodes awaits its keep")
        if len(tree) > target.max_tree_nodes:
            raise ValueError(f"tree has {len(tree):,} nodes, this target takes {target.max_tree_nodes:,}")
        length = self.rows.num_committed + 1 + max(tree.depths)
        if length > target.max_context:
            raise ValueError(f"tree reaches a length of {length:,} tokens, this target's context is {target.max_context:,}")
        check_token_ids(tree.token_ids, target.vocabulary_size)


def check_token_ids(token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    """Raises ValueError if a token is not in the vocabulary."""
    if min(token_ids) < 0 or max(token_ids) >= vocabulary_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocabulary_size)
        raise ValueError(f"token {wrong:,} is not in the vocabulary of {vocabulary_size:,} tokens")
