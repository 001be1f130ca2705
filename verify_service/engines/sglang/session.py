"""This file is what the engine knows of one session: its KV slots, and which work it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from treewire.core.acceptance import Acceptance
from treewire.core.history import History, NodeHistories
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import PrefillChunk, Scoring, Target
from verify_service.engines.admission import check_chunk, check_tree
from verify_service.engines.sglang.messages import Part


class NumberPool:
    """Hands out the numbers from 1 on: SGLang's slots and rows, whose number 0 is for padding. The last returned go first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size, 0, -1))

    @property
    def num_free(self) -> int:
        """Numbers that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take that many. Callers check `num_free` first; too few is a fault of our own."""
        assert count <= self.num_free, f"{count} numbers wanted, {self.num_free} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Return numbers that were taken."""
        self._free.extend(numbers)


@dataclass(eq=False)
class Session:
    """One generation's state. `slots` has the prompt's slots, then those of kept nodes; `num_committed` of them are computed.

    `num_written` of them stand in the session's `row` of SGLang's table. `tree` is the one that awaits its keep.
    """

    row: int
    prompt: tuple[int, ...]
    sampling: Sampling
    num_node_probabilities: int
    slots: list[int]
    history: History
    wants_features: bool
    num_committed: int = field(default=0, init=False)
    num_written: int = field(default=0, init=False)
    tree: DraftTree | None = field(default=None, init=False)
    tree_slots: list[int] = field(default_factory=list, init=False)

    def check(self, item: PrefillChunk | Scoring, target: Target) -> None:
        """Raises ValueError, with value and limit, if this is not work that the session can take now."""
        if isinstance(item, PrefillChunk):
            check_chunk(self.prompt, self.num_committed, item)
            return
        if self.num_committed < len(self.prompt):
            raise ValueError(f"{self.num_committed} of {len(self.prompt)} prompt tokens are prefilled, no tree yet")
        if self.tree is not None:
            raise ValueError(f"the last tree of {len(self.tree)} nodes awaits its keep")
        check_tree(target, self.num_committed, item.tree)

    def chunk_part(self, chunk: PrefillChunk) -> Part:
        """The next chunk of the prompt as part of a step."""
        stop = self.num_committed + len(chunk.token_ids)
        return self._part(chunk.token_ids, None, self.slots[self.num_committed : stop], num_choices=int(chunk.last))

    def tree_part(self, tree: DraftTree, pool: NumberPool) -> Part:
        """A tree as part of a step. Takes its slots."""
        self.tree, self.tree_slots = tree, pool.take(len(tree))
        slots = [*self.slots[self.num_written : self.num_committed], *self.tree_slots]
        return self._part(tree.token_ids, tree, slots, num_choices=len(tree))

    def computed(self, part: Part) -> None:
        """The part has been computed."""
        if part.tree is None:
            self.num_committed += len(part.token_ids)
        self.num_written = self.num_committed

    def keep(self, acceptance: Acceptance, pool: NumberPool) -> None:
        """Of the tree keep the accepted path. Raises ValueError if no tree awaits it or the nodes are no path from the root."""
        if self.tree is None:
            raise ValueError("there is no tree to keep nodes of")
        nodes = acceptance.nodes
        if not nodes or not 0 <= nodes[-1] < len(self.tree) or nodes != self.tree.path(nodes[-1]):
            raise ValueError(f"nodes {nodes} are no path from the root of a tree of {len(self.tree)} nodes")
        kept = set(nodes)
        self.slots.extend(self.tree_slots[node] for node in nodes)
        pool.give_back(slot for node, slot in enumerate(self.tree_slots) if node not in kept)
        self.num_committed += len(nodes)
        self.history.extend(self.tree.token_ids[node] for node in nodes)
        self.tree, self.tree_slots = None, []

    def release(self, pool: NumberPool) -> None:
        """Return every slot."""
        pool.give_back(self.tree_slots)
        pool.give_back(reversed(self.slots))

    def _histories(self, tree: DraftTree | None) -> NodeHistories | None:
        if not self.sampling.reads_history:
            return None
        return self.history.now() if tree is None else self.history.over(tree)

    def _part(self, token_ids: tuple[int, ...], tree: DraftTree | None, slots: list[int], num_choices: int) -> Part:
        return Part(
            row=self.row,
            prefix_length=self.num_committed,
            write_from=self.num_written,
            slots=tuple(slots),
            token_ids=token_ids,
            tree=tree,
            num_choices=num_choices,
            sampling=self.sampling,
            num_node_probabilities=self.num_node_probabilities,
            histories=self._histories(tree) if num_choices else None,
            wants_features=self.wants_features,
        )
