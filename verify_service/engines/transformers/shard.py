"""This file is what one of several ranks holds of a model: whole heads, and spans of the MLP and of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verify_service.engine import Unsupported
from verify_service.engines.transformers.architecture import Architecture


@dataclass(frozen=True)
class Shard:
    """The share of rank `rank` of `size`. The default is the whole model."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """True if there is no other rank."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True on the rank that adds what must be added once, and answers."""
        return self.rank == 0

    def span(self, total: int, unit: int = 1) -> slice:
        """Of `total` rows, in units that stay together, this rank's; the ranks' differ by at most one unit."""
        num_units = total // unit
        return slice(num_units * self.rank // self.size * unit, num_units * (self.rank + 1) // self.size * unit)

    def of(self, architecture: Architecture) -> Architecture:
        """The architecture of this share: fewer heads, all else the same."""
        return replace(
            architecture,
            num_heads=architecture.num_heads // self.size,
            num_kv_heads=architecture.num_kv_heads // self.size,
        )


def check_shards(architecture: Architecture, num_ranks: int) -> None:
    """Raises Unsupported, with the numbers, for a model that so many ranks cannot share."""
    if architecture.num_kv_heads % num_ranks:
        counts = [count for count in range(1, architecture.num_kv_heads + 1) if not architecture.num_kv_heads % count]
        raise Unsupported(
            f"{architecture.num_kv_heads} KV heads ({architecture.num_heads} heads) do not divide over {num_ranks} ranks; "
            f"tp_size may be {', '.join(map(str, counts))}"
        )
    if architecture.vocabulary_size < num_ranks:
        raise Unsupported(f"a vocabulary of {architecture.vocabulary_size} tokens does not divide over {num_ranks} ranks")
