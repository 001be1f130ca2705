"""This file is what every engine's ranks and their parent say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True, eq=False)
class StepMasks:
    """What may be chosen in the step that is under way: the rows of each masked part, by its number. For rank 0 alone.

    A message of their own, so that they may be found while the step computes.
    """

    rows: Mapping[int, NDArray[np.int32]]
