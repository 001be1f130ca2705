"""This file is the pages of KV slots: one slot holds the keys and values of one token position in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treewire.kv.prefixes import CachedPage, PrefixTree

PAGE_SIZES = (1, 8, 16)


class KvExhausted(RuntimeError):
    """More KV slots are needed than are free. Raised before anything is computed or taken; nothing has changed."""

    def __init__(self, session: int, num_needed: int, num_free: int, num_slots: int) -> None:
        super().__init__(f"session {session} needs {num_needed} KV slots, {num_free} of {num_slots} are free")
        self.session = session
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_slots = num_slots


class Room(NamedTuple):
    """Slots that something needs, and slots that it could have, cached prefixes being evicted for it."""

    num_needed: int
    num_free: int


class PagedKv:
    """Hands out pages of `page_size` slots, and keeps the committed prefixes of past and present sessions for new ones.

    A page is free, private to a session, or in `prefixes`: shared by any number of sessions, or by none and evicted when its
    memory is needed. The last returned are the first reused, so memory is touched only up to the peak.
    Raises ValueError on another page size or if not one page fits.
    """

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        if page_size not in PAGE_SIZES:
            raise ValueError(f"the KV page size is {page_size}, it must be one of {', '.join(map(str, PAGE_SIZES))}")
        if num_tokens < page_size:
            raise ValueError(f"KV memory of {num_tokens} tokens has no room for a page of {page_size}")
        self.page_size = page_size
        self.num_pages = num_tokens // page_size
        self.prefixes = PrefixTree(page_size)
        self._free = list(reversed(range(self.num_pages)))

    @property
    def num_slots(self) -> int:
        """Token positions that fit in all."""
        return self.num_pages * self.page_size

    @property
    def num_free(self) -> int:
        """Slots in pages that no session holds."""
        return (len(self._free) + self.prefixes.num_unused) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-num_tokens // self.page_size)

    def match(self, prompt: Sequence[int]) -> list[CachedPage]:
        """The cached pages that a prompt begins with; its last token is never among them, it is always computed."""
        return self.prefixes.match(prompt[:-1])

    def room_for(self, prompt: Sequence[int], num_tree_nodes: int, *, shares: bool = True) -> Room:
        """What a session would need for its prompt and a tree after it, and what it could have."""
        matched = self.match(prompt) if shares else []
        num_pages = self.pages_for(len(prompt) + num_tree_nodes) - len(matched)
        num_awakened = sum(not page.num_users for page in matched)
        return Room(num_pages * self.page_size, self.num_free - num_awakened * self.page_size)

    def take(self, num_pages: int) -> list[int]:
        """Take that many pages, evicting where none is free. Callers check the room first; too little is our own fault."""
        num_available = len(self._free) + self.prefixes.num_unused
        assert num_pages <= num_available, f"{num_pages} pages wanted, {num_available} free"
        return [self._free.pop() if self._free else self.prefixes.evict() for _ in range(num_pages)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages that were taken."""
        self._free.extend(pages)
