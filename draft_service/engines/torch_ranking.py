"""This file is the ranking of a drafter's tokens on its device, the twin of `ranking` for engines on torch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from treewire.core.build import USUAL_WEIGHTS, BranchWeights
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
    target does not draw with it. `weights` are what log-prob and noise count in the ranking at temperature 1.

    `candidate_ids` int64 [candidates] are those tokens, in ascending order; None are all of the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary_size: int,
        candidate_ids: Tensor | None,
        weights: BranchWeights = USUAL_WEIGHTS,
    ) -> None:
        self.sampling = sampling
        self.weights = weights if sampling.is_greedy else weights.at(sampling.temperature)
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

    Log-probs are normalised over all candidates at the row's temperature (greedy: 1), then over those that top-k, top-p and
    min-p leave; rows rank by them, those with noise by both weighted. Candidates are named by their index.
    """
    temperatures = [noise.sampling.temperature or 1.0 for noise in noises]
    tempered = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        tempered = tempered / torch.tensor(temperatures, device=logits.device)[:, None]
    log_probs = tempered.log_softmax(-1)
    for row, noise in zip(log_probs, noises, strict=True):
        if noise.sampling.truncates:
            row.copy_(_truncated(row, noise.sampling))
    width = min(width, log_probs.shape[1])
    if all(noise.is_silent for noise in noises):
        best = highest(log_probs, width)
        return Guesses(best.token_ids, best.scores)
    scores = [
        _scores(row, noise.weights, noise.at(position))
        for row, noise, position in zip(log_probs, noises, positions, strict=True)
    ]
    token_ids = highest(torch.stack(scores), width).token_ids
    return Guesses(token_ids, log_probs.gather(1, token_ids))


def _truncated(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """The candidates' log-probs [candidates] after top-k, top-p and min-p; those that are removed have -inf."""
    best = log_probs.sort(descending=True, stable=True)
    kept = best.values[: sampling.top_k or None].double().exp()
    reached = kept.cumsum(0)
    is_kept = torch.cat([reached.new_zeros(1), reached[:-1]]) < sampling.top_p * reached[-1]
    is_kept &= kept >= sampling.min_p * kept[0]
    is_kept[0] = True
    token_ids = best.indices[: len(kept)][is_kept]
    removed = torch.full_like(log_probs, -torch.inf)
    return removed.scatter(0, token_ids, log_probs[token_ids]).log_softmax(-1)


def _scores(log_probs: Tensor, weights: BranchWeights, noise: Tensor | None) -> Tensor:
    """What candidates rank by, float32 [candidates]."""
    return log_probs if noise is None else weights.log_prob * log_probs + weights.noise * noise.to(log_probs.device)


def _noise_row(seed: int, vocabulary_size: int, candidate_ids: Tensor | None, position: int) -> Tensor:
    if candidate_ids is None:
        return torch.from_numpy(noise_row(seed, position, vocabulary_size))
    return torch.from_numpy(noise_at(seed, position, candidate_ids.cpu().numpy())).to(candidate_ids.device)
