"""This file is the target's paths: what it says to prompts under fixed seeds, and all that the rounds along them need of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import Posterior, PrefillChunk, Scoring, TargetEngine

MAX_BATCH_SIZE = 64
FIRST_SEED = 100
_session_ids = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Path:
    """A prompt and the target's answer under `sampling`.

    `probabilities`, float64 [answer], are those that the target gave the answer's tokens, after the whole chain of processing.
    `features`, float32 [positions, size], are of all tokens but the last; None if the target makes none.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    token_ids: tuple[int, ...]
    probabilities: NDArray[np.float64]
    features: NDArray[np.float32] | None


@dataclass
class _Growing:
    prompt: tuple[int, ...]
    sampling: Sampling
    known_features: NDArray[np.float32] | None
    session: int = field(default_factory=lambda: next(_session_ids))
    num_known: int = 0
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)

    def opened(self, target: TargetEngine) -> PrefillChunk:
        """What is left of the prompt, of which another path may have computed the rest."""
        wanted_from = 0 if self.known_features is None else len(self.prompt) - 1
        wants = target.target.feature_size > 0
        self.num_known = target.open(
            self.session, self.prompt, self.sampling, wants_features=wants, first_feature_position=wanted_from if wants else 0
        )
        if self.known_features is not None:
            self.features.append(self.known_features[: self.num_known])
        return PrefillChunk(self.session, self.prompt[self.num_known :], last=True)

    def append(self, posterior: Posterior) -> None:
        (token_id,) = posterior.token_ids
        assert posterior.distributions is not None, "a posterior with a choice has what it was made from"
        self.token_ids.append(token_id)
        self.probabilities.append(float(posterior.distributions.probabilities(0)[token_id]))
        if posterior.features is not None:
            self.features.append(posterior.features)

    def path(self) -> Path:
        features = np.concatenate(self.features)[: len(self.prompt) + len(self.token_ids) - 1] if self.features else None
        return Path(self.prompt, self.sampling, tuple(self.token_ids), np.array(self.probabilities), features)


def follow(
    target: TargetEngine,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    max_tokens: int,
    known: Sequence[Path] = (),
) -> list[Path]:
    """The target's answers to all prompts, each with a seed of its own, up to their end or to `max_tokens`.

    All grow a token a step, MAX_BATCH_SIZE at a time. `known` are paths of the same prompts: what their features say of the
    prompts is not computed again.
    """
    growing = [
        _Growing(prompt, replace(sampling, seed=FIRST_SEED + number), known[number].features if known else None)
        for number, prompt in enumerate(prompts)
    ]
    for start in range(0, len(growing), MAX_BATCH_SIZE):
        _grow(target, growing[start : start + MAX_BATCH_SIZE], max_tokens)
    return [each.path() for each in growing]


def _grow(target: TargetEngine, batch: Sequence[_Growing], max_tokens: int) -> None:
    ends = set(target.target.end_token_ids)
    for each, posterior in zip(batch, target.step([each.opened(target) for each in batch]), strict=True):
        each.append(posterior)
    while running := [each for each in batch if len(each.token_ids) < max_tokens and each.token_ids[-1] not in ends]:
        work = [Scoring(each.session, DraftTree.lone_root(each.token_ids[-1])) for each in running]
        for each, posterior in zip(running, target.step(work), strict=True):
            each.append(posterior)
            target.keep(each.session, Acceptance((0,), each.token_ids[-1]))
    for each in batch:
        target.release(each.session)
