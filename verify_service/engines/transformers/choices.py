"""This file is the target's choices from whole rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from verify_service.engine import Posterior, SessionId
from verify_service.engines.sampling import NoiseRows, TensorDistributions, allow_only, choose, likeliest, process
from verify_service.engines.transformers.parts import Part


class Chooser(Protocol):
    """Makes posteriors of a step's logits."""

    def posteriors(self, parts: Sequence[Part], logits: Sequence[Tensor]) -> Sequence[Posterior]:
        """One for each part, whose choices' logits [choices, vocabulary] these are; without features."""

    def forget(self, session: SessionId) -> None:
        """The session has ended."""


class Noise:
    """The shared noise of the sessions that draw, over `vocabulary`, a span of token ids."""

    def __init__(self, vocabulary: slice) -> None:
        self._vocabulary = vocabulary
        self._rows: dict[SessionId, NoiseRows] = {}

    def of(self, part: Part, device: torch.device) -> Tensor | None:
        """Noise of the tokens that are chosen, float32 [choices, span]; None if the part draws nothing."""
        if part.sampling.is_greedy:
            return None
        rows = self._rows.get(part.session)
        if rows is None or rows.seed != part.sampling.seed:
            rows = NoiseRows(part.sampling.seed, self._vocabulary.stop, self._vocabulary.start)
            self._rows[part.session] = rows
        return rows.at(part.chosen_positions, device)

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._rows.pop(session, None)


class WholeRows:
    """Chooses where the rows are whole."""

    def __init__(self, vocabulary_size: int) -> None:
        self._noise = Noise(slice(0, vocabulary_size))

    @torch.inference_mode()
    def posteriors(self, parts: Sequence[Part], logits: Sequence[Tensor]) -> Sequence[Posterior]:
        """One for each part, with its distributions."""
        return [self._posterior(part, rows) for part, rows in zip(parts, logits, strict=True)]

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._noise.forget(session)

    def _posterior(self, part: Part, logits: Tensor) -> Posterior:
        """The target's choice after each of the part's last rows, whose logits these are."""
        if not part.num_choices:
            return Posterior(())
        allowed = allow_only(logits, None if part.masks is None else part.masks.rows())
        log_probs = process(allowed, part.sampling, part.histories)
        chosen = choose(log_probs, self._noise.of(part, logits.device))
        count = part.num_node_probabilities
        distributions = TensorDistributions(logits, log_probs, is_greedy=part.sampling.is_greedy)
        return Posterior(tuple(chosen.tolist()), likeliest(log_probs, count) if count else (), distributions=distributions)
