"""This file is a session's rows: which slots hold its committed sequence, and which a tree that awaits its keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treewire.kv.pages import PagedKv, Room

Slots = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that have to be copied for a keep: from each source slot to its destination, all read before any is written."""

    sources: Slots
    destinations: Slots

    def __len__(self) -> int:
        return len(self.sources)


class SessionRows:
    """The slots of one session, in order of position: position p is in slot p modulo the page size of page p over it.

    A prompt that begins with a cached prefix starts with those pages, committed, unless it `shares` none; the pages for the
    rest of it are taken at once and filled chunk by chunk. A tree's rows are provisional until `keep`. Committed pages that
    are full are cached, and only they are: what a session writes to is its own.

    What tells rows apart need not be tokens: it is whatever, along a path, their keys and values are a function of.
    """

    def __init__(self, kv: PagedKv, prompt: Sequence[int], *, shares: bool = True) -> None:
        self._kv = kv
        self._shared = kv.match(prompt) if shares else []
        kv.prefixes.hold(self._shared)
        self._pages = [page.page for page in self._shared]
        self._pages += kv.take(kv.pages_for(len(prompt)) - len(self._pages))
        self._token_ids = list(prompt[: len(self._shared) * kv.page_size])
        self.prompt_length = len(prompt)
        self.num_tree_slots = 0

    @property
    def num_committed(self) -> int:
        """Rows that are computed and kept."""
        return len(self._token_ids)

    @property
    def committed(self) -> Slots:
        """Slots of the rows that are computed and kept."""
        return self._slots(0, self.num_committed)

    @property
    def prefill_is_complete(self) -> bool:
        """True once the whole prompt is computed."""
        return self.num_committed >= self.prompt_length

    @property
    def awaits_keep(self) -> bool:
        """True between a tree's score and its keep."""
        return self.num_tree_slots > 0

    def room_for(self, num_rows: int) -> Room:
        """What so many rows after the committed ones would need, a tree's or a chunk's, and what they could have."""
        return Room(self._num_pages_for(num_rows) * self._kv.page_size, self._kv.num_free)

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Commit what is cached of the next tokens, whole pages that need not be computed; how many tokens that is."""
        first = len(self._shared)
        if first * self._kv.page_size != self.num_committed:
            return 0
        adopted = self._kv.prefixes.match(token_ids, self._shared[-1] if self._shared else None)
        self._kv.prefixes.hold(adopted)
        self._kv.give_back(self._pages[first : first + len(adopted)])
        self._pages[first : first + len(adopted)] = [page.page for page in adopted]
        self._shared += adopted
        self._token_ids += token_ids[: len(adopted) * self._kv.page_size]
        return len(adopted) * self._kv.page_size

    def next_slots(self, num_tokens: int) -> Slots:
        """Where the next chunk's rows go; pages are taken for what reaches beyond the prompt."""
        self._pages += self._kv.take(self._num_pages_for(num_tokens))
        return self._slots(self.num_committed, self.num_committed + num_tokens)

    def commit_chunk(self, token_ids: Sequence[int]) -> None:
        """The next chunk has been computed."""
        self._commit(token_ids)

    def take_tree_slots(self, num_nodes: int) -> Slots:
        """Provisional slots for the nodes of a tree: those after the committed rows."""
        slots = self.next_slots(num_nodes)
        self.num_tree_slots = num_nodes
        return slots

    def keep(self, nodes: Sequence[int], token_ids: Sequence[int]) -> Moves:
        """Of the tree's rows keep these nodes' in this order, a path with these tokens; the others are free again.

        With pages of one slot nothing moves: the sequence goes on with the nodes' own pages. In larger pages a row moves up
        where a node before it was not kept.
        """
        first = self.num_committed
        moves = Moves(np.empty(0, np.int64), np.empty(0, np.int64))
        if self._kv.page_size == 1:
            tree_pages = self._pages[first:]
            kept = set(nodes)
            self._pages[first:] = [tree_pages[node] for node in nodes]
            self._kv.give_back(page for node, page in enumerate(tree_pages) if node not in kept)
        else:
            moves = self._moves(nodes)
            num_pages = self._kv.pages_for(first + len(nodes))
            self._kv.give_back(self._pages[num_pages:])
            del self._pages[num_pages:]
        self.num_tree_slots = 0
        self._commit(token_ids)
        return moves

    def release(self) -> None:
        """Let go of every page. The cached ones stay for others until their memory is needed."""
        self._kv.give_back(reversed(self._pages[len(self._shared) :]))
        self._kv.prefixes.let_go(self._shared)
        self._pages, self._shared, self._token_ids, self.num_tree_slots = [], [], [], 0

    def _num_pages_for(self, num_rows: int) -> int:
        """Pages that so many rows after the committed ones need beside those that are held."""
        return max(0, self._kv.pages_for(self.num_committed + num_rows) - len(self._pages))

    def _slots(self, start: int, stop: int) -> Slots:
        """Slots of the positions from `start` to `stop`."""
        size = self._kv.page_size
        pages = np.array(self._pages[start // size : self._kv.pages_for(stop)], np.int64)
        slots = (pages[:, np.newaxis] * size + np.arange(size)).reshape(-1)
        return slots[start % size : start % size + stop - start]

    def _moves(self, nodes: Sequence[int]) -> Moves:
        slots = self._slots(self.num_committed, self.num_committed + self.num_tree_slots)
        moving = [(node, place) for place, node in enumerate(nodes) if node != place]
        return Moves(slots[[node for node, _ in moving]], slots[[place for _, place in moving]])

    def _commit(self, token_ids: Sequence[int]) -> None:
        """Append to the sequence and cache the pages that are full now."""
        self._token_ids += token_ids
        size = self._kv.page_size
        for number in range(len(self._shared), self.num_committed // size):
            self._cache(number, tuple(self._token_ids[number * size : (number + 1) * size]))

    def _cache(self, number: int, tokens: tuple[int, ...]) -> None:
        """Put a full page among the cached ones; if they have these tokens already, take theirs and return ours."""
        cached = self._kv.prefixes.insert(self._shared[-1] if self._shared else None, tokens, self._pages[number])
        self._kv.prefixes.hold([cached])
        self._shared.append(cached)
        if cached.page != self._pages[number]:
            self._kv.give_back([self._pages[number]])
            self._pages[number] = cached.page
