"""This file is what every engine's ranks and their parent say to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Idle:
    """Nothing to do. Shows the ranks that rank 0 lives."""


@dataclass(frozen=True)
class Stop:
    """End, with exit code 0."""


@dataclass(frozen=True)
class NotFinite:
    """The step ran, but a logit is not a finite number."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The rank ends, for this reason. `is_refusal` if nothing is broken but the request cannot be served."""

    rank: int
    reason: str
    is_refusal: bool
