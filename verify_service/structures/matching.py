"""This file is one output followed through its structure: what may come next, after each node of a tree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from treewire.core.tree import DraftTree
from verify_service.structures.pruning import Pruning

Rows = NDArray[np.int32]
_WORD_BITS = 32


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

    def find_jump_forward_string(self) -> str:
        """The text that must come next; empty where there is a choice."""


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
    encode: Callable[[str], list[int]]

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens. Raises ValueError at one that does not fit; tokens behind its end are none."""
        for token_id in token_ids:
            if self.matcher.is_terminated():
                return
            if not self.matcher.accept_token(token_id):
                raise ValueError(f"token {token_id} does not match the structure")

    def pruned(self, tree: DraftTree, deepest: int) -> Pruning:
        """The nodes of a tree whose whole path fits, and in place of the others what the structure forces after them.

        What is forced is a guess like any other: it is one text, but the target may cut it into other tokens. No graft is
        below `deepest`.
        """
        fitting = tuple(sorted(visit.node for visit in self._visits(tree) if visit.fits))
        token_ids, parents = list(tree.token_ids), list(tree.parents)
        with closing(self._visits(tree)) as visits:
            for node in (visit.node for visit in visits if visit.fits):
                room = min(len(tree) - len(fitting) - (len(token_ids) - len(tree)), deepest - tree.depths[node])
                forced = self._forced()[: max(0, room)]
                if forced and all(tree.token_ids[child] != forced[0] for child in tree.children[node]):
                    parents += [node, *range(len(token_ids), len(token_ids) + len(forced) - 1)]
                    token_ids += forced
        grown = DraftTree(tuple(token_ids), tuple(parents), tree.draws)
        return Pruning(grown, (*fitting, *range(len(tree), len(grown))), len(tree))

    def _forced(self) -> list[int]:
        """The text that must come next, as tokens that fit."""
        if self.matcher.is_terminated():
            return []
        token_ids = self.encode(self.matcher.find_jump_forward_string())
        num_fitting = 0
        while num_fitting < len(token_ids) and self.matcher.accept_token(token_ids[num_fitting]):
            num_fitting += 1
        self.matcher.rollback(num_fitting)
        return token_ids[:num_fitting]

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


def pending(match: Match, tree: DraftTree | None, executor: Executor, timeout_seconds: float) -> PendingMasks:
    """The masks of a tree whose nodes all fit, or with none of what comes next, filled by the executor."""
    if tree is None:
        return PendingMasks(executor.submit(match.next_row), match.end_rows(1), timeout_seconds)
    return PendingMasks(executor.submit(match.rows, tree), match.end_rows(len(tree)), timeout_seconds)
