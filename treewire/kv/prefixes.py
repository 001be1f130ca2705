"""This file is the tree of cached prefixes: which committed pages hold which tokens, for sessions to come that begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

_FEWEST_ENTRIES = 64  # below this the heap is never swept


@dataclass(eq=False)
class CachedPage:
    """A full page of committed tokens after those of its parent; `num_users` counts the sessions that hold it.

    Whoever holds a page holds its ancestors, so an unused page has only unused descendants.
    """

    page: int
    tokens: tuple[int, ...]
    parent: CachedPage | None
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict)
    num_users: int = 0
    last_used: int = 0

    @property
    def is_evictable(self) -> bool:
        """True if nobody holds it and nothing comes after it."""
        return not self.num_users and not self.children


class PrefixTree:
    """A radix tree over pages of `page_size` tokens: a path from the root is a prefix that some session has committed.

    Pages are let go in order of use: of the evictable ones, the one whose last session left first is evicted first.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[tuple[int, ...], CachedPage] = {}
        self._clock = itertools.count(1)
        self._serials = itertools.count()
        self._evictable: list[tuple[int, int, CachedPage]] = []  # a heap; entries may be out of date
        self.num_pages = 0
        self.num_unused = 0

    def match(self, token_ids: Sequence[int], after: CachedPage | None = None) -> list[CachedPage]:
        """The longest cached prefix of these tokens, page by page, from the root or after a page. Holds nothing."""
        matched: list[CachedPage] = []
        children, size = self._roots if after is None else after.children, self._page_size
        for start in range(0, len(token_ids) - size + 1, size):
            page = children.get(tuple(token_ids[start : start + size]))
            if page is None:
                break
            matched.append(page)
            children = page.children
        return matched

    def insert(self, parent: CachedPage | None, tokens: tuple[int, ...], page: int) -> CachedPage:
        """The cached page of these tokens after `parent`: the one that is there, or a new one over `page`."""
        children = self._roots if parent is None else parent.children
        if tokens not in children:
            children[tokens] = CachedPage(page, tokens, parent)
            self.num_pages += 1
            self.num_unused += 1
        return children[tokens]

    def hold(self, pages: Sequence[CachedPage]) -> None:
        """One user more for each page."""
        for page in pages:
            self.num_unused -= not page.num_users
            page.num_users += 1

    def let_go(self, pages: Sequence[CachedPage]) -> None:
        """One user less for each page of a path. Unused pages stay cached until their memory is needed."""
        now = next(self._clock)
        for page in pages:
            page.num_users -= 1
            page.last_used = now
            self.num_unused += not page.num_users
        if pages:
            self._offer(pages[-1])

    def evict(self) -> int:
        """Forget the page that has been unused for longest, and return its number. There must be an unused one."""
        assert self.num_unused, "no unused page is cached"
        while True:
            last_used, _, page = heappop(self._evictable)
            if self._is_current(page, last_used):
                break
        del (self._roots if page.parent is None else page.parent.children)[page.tokens]
        page.last_used = -1
        self.num_pages -= 1
        self.num_unused -= 1
        if page.parent is not None:
            self._offer(page.parent)
        return page.page

    def _offer(self, page: CachedPage) -> None:
        if not page.is_evictable:
            return
        heappush(self._evictable, (page.last_used, next(self._serials), page))
        if len(self._evictable) > max(2 * self.num_pages, _FEWEST_ENTRIES):
            current = {entry[2]: entry for entry in self._evictable if self._is_current(entry[2], entry[0])}
            self._evictable = list(current.values())
            heapify(self._evictable)

    @staticmethod
    def _is_current(page: CachedPage, last_used: int) -> bool:
        return page.is_evictable and page.last_used == last_used
