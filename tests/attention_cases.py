"""Attention over buckets of random sessions in pages, and what it must be: float64, one node after the other, with no mask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.engines.target_contract import random_tree
from treewire.core.tree import DraftTree
from treewire.core.visibility import visibility
from treewire.kv.store import KvStore
from verify_service.attention.bucket import BucketAttention, BucketRows, BucketShape, Heads

LAYER = 3


class PagedSession(NamedTuple):
    """A tree, and the slots of what was committed before it and of its nodes, in order of position."""

    tree: DraftTree
    slots: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.slots) - len(self.tree)


@dataclass(frozen=True, eq=False)
class Case:
    """Sessions in a bucket, whose committed keys and values are in a store; everything else in it is NaN."""

    shape: BucketShape
    sessions: Sequence[PagedSession]
    store: KvStore
    heads: Heads
    page_size: int
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(
        cls,
        rng: random.Random,
        shape: BucketShape,
        heads: Heads,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Case:
        """A case whose sessions fill the bucket more or less: the first to the brim, the last not at all if there are two."""
        num_sessions = max(1, shape.num_sessions - 1)
        pages = list(range(shape.num_sessions * -(-(shape.context + shape.num_nodes) // page_size)))
        rng.shuffle(pages)
        sessions = []
        for number in range(num_sessions):
            length = rng.randrange(1, shape.context + 1) if number else shape.context
            tree = random_tree(rng, 0, 997, rng.randrange(1, shape.num_nodes + 1) if number else shape.num_nodes)
            own = [pages.pop() for _ in range(-(-(length + len(tree)) // page_size))]
            slots = np.array([page * page_size + place for page in own for place in range(page_size)], np.int64)
            sessions.append(PagedSession(tree, slots[: length + len(tree)]))
        num_rows = shape.num_sessions * shape.num_nodes
        generator = torch.Generator(device).manual_seed(rng.randrange(1 << 30))

        def drawn(rows: int, num_heads: int) -> Tensor:
            return torch.randn(rows, num_heads, heads.size, generator=generator, device=device, dtype=dtype)

        num_slots = page_size * (1 + max(int(session.slots.max()) // page_size for session in sessions)) + page_size
        store = KvStore(num_slots)
        nothing = torch.full((num_slots, heads.num_kv_heads, heads.size), torch.nan, device=device, dtype=dtype)
        store.write(LAYER, torch.arange(num_slots, device=device), nothing, nothing)
        for session in sessions:
            committed = torch.from_numpy(session.slots[: session.length]).to(device)
            store.write(LAYER, committed, *(drawn(session.length, heads.num_kv_heads) for _ in range(2)))
        key, value = (drawn(num_rows, heads.num_kv_heads) for _ in range(2))
        return cls(shape, sessions, store, heads, page_size, drawn(num_rows, heads.num_heads), key, value)

    @property
    def rows(self) -> BucketRows:
        """What the rows see, as a bucket's program lays it out."""
        shape, spare = self.shape, self.store.num_slots - self.page_size
        slots = torch.full((shape.num_sessions, shape.num_nodes), spare)
        key_slots = torch.full((shape.num_sessions, shape.context + shape.num_nodes), spare)
        visible = torch.eye(shape.num_nodes, dtype=torch.bool).repeat(shape.num_sessions, 1, 1)
        visible[:, :, 0] = True
        lengths, counts = (torch.zeros(shape.num_sessions, dtype=torch.int64) for _ in range(2))
        for number, (tree, own) in enumerate(self.sessions):
            lengths[number], counts[number] = len(own) - len(tree), len(tree)
            committed, nodes = torch.from_numpy(own).split([len(own) - len(tree), len(tree)])
            slots[number, : len(tree)] = nodes
            key_slots[number] = nodes[0]
            key_slots[number, : len(committed)] = committed
            key_slots[number, shape.context : shape.context + len(tree)] = nodes
            visible[number, : len(tree), : len(tree)] = torch.from_numpy(visibility(tree.parents))
        device = self.query.device
        return BucketRows(*(numbers.to(device) for numbers in (lengths, counts, slots, key_slots, visible)))

    def attended(self, attention: BucketAttention) -> list[Tensor]:
        """What it gives each session's real rows [nodes, heads, size]."""
        attention.plan([session.slots for session in self.sessions])
        attention.begin(self.rows)
        rows = attention(LAYER, self.query, self.key, self.value).view(*self.shape[:2], *self.query.shape[1:])
        return [rows[number, : len(session.tree)] for number, session in enumerate(self.sessions)]

    def expected(self) -> list[Tensor]:
        """The reference, float64: each node over the committed tokens and its own path, nothing else being there."""
        stored = self.store.layer(LAYER)
        by_session = [rows.view(*self.shape[:2], *rows.shape[1:]).double() for rows in (self.query, self.key, self.value)]
        found = []
        for number, session in enumerate(self.sessions):
            query, key, value = (rows[number] for rows in by_session)
            committed = torch.from_numpy(session.slots[: session.length]).to(self.query.device)
            nodes = []
            for node in range(len(session.tree)):
                path = list(session.tree.path(node))
                keys, values = (
                    torch.cat((rows[committed].double(), own[path])).repeat_interleave(self._group, dim=1)
                    for rows, own in zip(stored, (key, value), strict=True)
                )
                weights = torch.einsum("hd,khd->hk", query[node], keys).mul(self.heads.size**-0.5).softmax(-1)
                nodes.append(torch.einsum("hk,khd->hd", weights, values))
            found.append(torch.stack(nodes))
        return found

    def largest_difference(self, attention: BucketAttention) -> float:
        """From the reference; NaN counts as infinite."""
        pairs = zip(self.attended(attention), self.expected(), strict=True)
        return max((found.double() - expected).abs().nan_to_num(torch.inf).max().item() for found, expected in pairs)

    @property
    def _group(self) -> int:
        return self.heads.num_heads // self.heads.num_kv_heads


RATIOS = ((4, 4), (8, 2), (7, 1))
"""Query heads and KV heads."""
