"""This file is what is asked of the ranks after a step: what the target held likely, of which they keep the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treewire.core.tree import TokenLogProbs
from verify_service.engines.ranks.processes import Ranks


@dataclass(frozen=True)
class AskProbabilities:
    """Of the last step's part of that number: the processed distribution after a node."""

    part: int
    node: int


@dataclass(frozen=True)
class AskLogProbs:
    """Of the last step's part of that number: log-probs of the tokens after these nodes, and of the likeliest."""

    part: int
    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_top: int


Question = AskProbabilities | AskLogProbs


class RankDistributions:
    """`verify_service.engine.Distributions` of one part of the last step, which the ranks keep."""

    def __init__(self, ranks: Ranks, part: int) -> None:
        self._ranks, self._part = ranks, part

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node, float64 [vocabulary]."""
        probabilities: NDArray[np.float64] = self._ranks.ask(AskProbabilities(self._part, node))
        return probabilities

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the likeliest ones; before any processing."""
        asked = AskLogProbs(self._part, tuple(nodes), tuple(token_ids), num_top)
        answered: tuple[TokenLogProbs, ...] = self._ranks.ask(asked)
        return answered
