"""This file is one output followed through its structure: what may come next, after each node of a tree."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from treewire.core.tree import DraftTree
from verify_service.structures.habits import Habits
from verify_service.structures.pruning import Pruning

Rows = NDArray[np.int32]
_WORD_BITS = 32
_MOST_CHOICES = 12
_DRAFTED_COST = 1.0  # what the costs of guesses add up: a drafted token, one taken before or alone, and by rank
_KNOWN_COST = 0.1
_RANK_COST = 0.7


class Matcher(Protocol):
    """What is used of xgrammar's GrammarMatcher."""

    def accept_token(self, token_id: int) -> bool:
        """Go on with a token; False, and nothing changes, if it does not fit."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""

    def fill_next_token_bitmask(self, bitmask: Rows, index: int) -> bool:
        """Write the bits of the tokens that fit into a row; False if that are all."""

    def is_terminated(self) -> bool:
        """True after a token that ends the output."""


class _Guess(NamedTuple):
    """A token that may follow a node; guesses of less cost are likelier."""

    cost: float
    parent: int
    token_id: int


class Visit(NamedTuple):
    """A node of a tree, with the output followed up to it; or one that does not fit."""

    node: int
    fits: bool


@dataclass
class Match:
    """An output and the structure that it matches so far. Not for two threads at once.

    Once a token has ended the output nothing fits any more, and only the tokens that end it are allowed.
    """

    matcher: Matcher
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    _habits: Habits = field(default_factory=Habits, init=False)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens. Raises ValueError at one that does not fit; tokens behind its end are none."""
        for token_id in token_ids:
            if self.matcher.is_terminated():
                return
            if choices := _few_tokens(self.next_row()):
                self._habits.learn(choices, token_id)
            if not self.matcher.accept_token(token_id):
                raise ValueError(f"token {token_id} does not match the structure")

    def pruned(self, tree: DraftTree, deepest: int) -> Pruning:
        """The nodes of a tree whose whole path fits; in place of the others, where few tokens may follow, some of those.

        A graft is a guess like any other, none is below `deepest`. Where the same tokens were allowed before, the one that the
        output took then is tried first, else short and frequent ones: the lower ids.
        """
        fitting = tuple(sorted(visit.node for visit in self._visits(tree) if visit.fits))
        grown = self._grown(tree, fitting, deepest)
        return Pruning(grown, (*fitting, *range(len(tree), len(grown))), len(tree))

    def _grown(self, tree: DraftTree, fitting: Sequence[int], deepest: int) -> DraftTree:
        """The tree with as many grafts as it has nodes that do not fit, the likeliest first."""
        token_ids, parents, depths = list(tree.token_ids), list(tree.parents), list(tree.depths)
        paths: dict[int, tuple[int, ...]] = {0: ()}
        guesses: list[_Guess] = []

        def guess_after(node: int, cost: float, taken: Collection[int]) -> None:
            if depths[node] < deepest:
                for rank, token_id in enumerate(self._few_choices(paths[node])):
                    step = _KNOWN_COST if rank == 0 else _RANK_COST * (rank + 1)
                    if token_id not in taken:
                        heappush(guesses, _Guess(cost + step, node, token_id))

        num_grafts = len(tree) - len(fitting)
        for node in fitting if num_grafts else ():
            if node:
                paths[node] = (*paths[parents[node]], token_ids[node])
            guess_after(node, _DRAFTED_COST * depths[node], {token_ids[child] for child in tree.children[node]})
        while guesses and len(token_ids) < len(tree) + num_grafts:
            guess = heappop(guesses)
            node = len(token_ids)
            token_ids.append(guess.token_id)
            parents.append(guess.parent)
            depths.append(depths[guess.parent] + 1)
            paths[node] = (*paths[guess.parent], guess.token_id)
            guess_after(node, guess.cost, ())
        return DraftTree(tuple(token_ids), tuple(parents), tree.draws)

    def _few_choices(self, path: Sequence[int]) -> list[int]:
        """The tokens that may follow the output and a path that fits, likeliest first; none where there are many, or an end."""
        num_accepted = 0
        for token_id in path:
            num_accepted += self.matcher.accept_token(token_id)
        row = self.next_row()
        has_ended = self.matcher.is_terminated()
        self.matcher.rollback(num_accepted)
        return [] if has_ended else self._habits.likeliest_first(_few_tokens(row))

    def rows(self, tree: DraftTree) -> Rows:
        """What may follow each node of a tree whose nodes all fit, int32 [nodes, words]: bit v of a row is token v's."""
        rows = self._empty(len(tree))
        for visit in self._visits(tree):
            self._fill(rows, visit.node)
        return rows

    def next_row(self) -> Rows:
        """What may come next, int32 [1, words]."""
        rows = self._empty(1)
        self._fill(rows, 0)
        return rows

    def end_rows(self, count: int) -> Rows:
        """Rows that allow nothing but the end, int32 [count, words]."""
        rows = self._empty(count)
        for token_id in self.end_token_ids:
            rows[:, token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS).astype(np.int32)
        return rows

    def _visits(self, tree: DraftTree) -> Generator[Visit, None, None]:
        """All nodes but those below one that does not fit, depth first; the root is the last token of the output itself."""
        yield Visit(0, True)
        ahead = [(child, 0) for child in reversed(tree.children[0])]
        depth = 0
        try:
            while ahead:
                node, parent_depth = ahead.pop()
                self.matcher.rollback(depth - parent_depth)
                depth = parent_depth
                fits = not self.matcher.is_terminated() and self.matcher.accept_token(tree.token_ids[node])
                if fits:
                    depth += 1
                    ahead.extend((child, depth) for child in reversed(tree.children[node]))
                yield Visit(node, fits)
        finally:
            self.matcher.rollback(depth)

    def _fill(self, rows: Rows, place: int) -> None:
        if not self.matcher.is_terminated():
            if not self.matcher.fill_next_token_bitmask(rows, place):
                rows[place] = -1
            if rows[place].any():
                return
        rows[place] = self.end_rows(1)[0]  # it has ended, or the vocabulary cannot spell what would have to come

    def _empty(self, count: int) -> Rows:
        return np.zeros((count, -(-self.vocabulary_size // _WORD_BITS)), np.int32)


@dataclass
class PendingMasks:
    """`verify_service.engine.Masks` that another thread fills meanwhile.

    If it fails or is not done in time the rows allow nothing but the end, and `failure` says why: the step goes on for the
    others in it.
    """

    filling: Future[Rows]
    fallback: Rows
    timeout_seconds: float
    failure: str | None = field(default=None, init=False)

    def rows(self) -> Rows:
        """What may follow, int32 [choices, words]. Waits."""
        wait([self.filling], self.timeout_seconds)
        if not self.filling.done():
            self.failure = f"what may come next was not found within {self.timeout_seconds:g} s"
        elif error := self.filling.exception():
            self.failure = f"what may come next cannot be found: {error}"
        return self.fallback if self.failure else self.filling.result()


def _few_tokens(row: Rows) -> list[int]:
    """The tokens whose bit is set, lowest first; none where there are many."""
    if int(np.bitwise_count(row.view(np.uint32)).sum()) > _MOST_CHOICES:
        return []
    tokens: list[int] = np.flatnonzero(np.unpackbits(row.astype("<i4").view(np.uint8), bitorder="little")).tolist()
    return tokens


def pending(match: Match, tree: DraftTree | None, executor: Executor, timeout_seconds: float) -> PendingMasks:
    """The masks of a tree whose nodes all fit, or with none of what comes next, filled by the executor."""
    if tree is None:
        return PendingMasks(executor.submit(match.next_row), match.end_rows(1), timeout_seconds)
    return PendingMasks(executor.submit(match.rows, tree), match.end_rows(len(tree)), timeout_seconds)
