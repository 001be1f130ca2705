"""This file is the ranking of a drafter's tokens on its device, the twin of `ranking` for engines on torch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from treewire.core.noise import noise_at, noise_row
from treewire.core.sampling import Sampling
from treewire.highest import highest

_NUM_NOISE_ROWS = 32  # per session: later rounds look at positions that an earlier one has looked at


class Guesses(NamedTuple):
    """The best tokens of each row, best first, equals by the lower token id; int64 and float32 [rows, width]."""

    token_ids: Tensor
    log_probs: Tensor


class SessionNoise:
    """The shared noise of one session over the tokens that its drafter can guess; none for a greedy one, and none where the
    target does not draw with it.

    `candidate_ids` int64 [candidates] are those tokens, in ascending order; None are all of the vocabulary.
    """

    def __init__(self, sampling: Sampling, vocabulary_size: int, candidate_ids: Tensor | None) -> None:
        self.temperature = sampling.temperature
        make = partial(_noise_row, sampling.seed, vocabulary_size, candidate_ids)
        aims = not sampling.is_greedy and sampling.shares_noise
        self._row = lru_cache(_NUM_NOISE_ROWS)(make) if aims else None

    @property
    def is_silent(self) -> bool:
        """True if there is no noise at any position."""
        return self._row is None

    def at(self, position: int) -> Tensor | None:
        """Noise float32 [candidates] of the token at a position."""
        return None if self._row is None else self._row(position)


def rank(logits: Tensor, noises: list[SessionNoise], positions: list[int], width: int) -> Guesses:
    """The best `width` candidates of each row of logits [rows, candidates], where row r is for the token at `positions[r]`.

    Log-probs are normalised over all candidates at the row's temperature (greedy: 1); rows rank by them plus the noise.
    Candidates are named by their index.
    """
    temperatures = [noise.temperature or 1.0 for noise in noises]
    tempered = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        tempered = tempered / torch.tensor(temperatures, device=logits.device)[:, None]
    log_probs = tempered.log_softmax(-1)
    width = min(width, log_probs.shape[1])
    rows = [noise.at(position) for noise, position in zip(noises, positions, strict=True)]
    if all(row is None for row in rows):
        best = highest(log_probs, width)
        return Guesses(best.token_ids, best.scores)
    silence = torch.zeros_like(log_probs[0])
    noise = torch.stack([silence if row is None else row.to(silence.device) for row in rows])
    token_ids = highest(log_probs + noise, width).token_ids
    return Guesses(token_ids, log_probs.gather(1, token_ids))


def _noise_row(seed: int, vocabulary_size: int, candidate_ids: Tensor | None, position: int) -> Tensor:
    if candidate_ids is None:
        return torch.from_numpy(noise_row(seed, position, vocabulary_size))
    return torch.from_numpy(noise_at(seed, position, candidate_ids.cpu().numpy())).to(candidate_ids.device)
