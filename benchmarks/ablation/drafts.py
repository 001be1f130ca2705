"""This file is what a drafter says along the target's paths: once after every token, many paths in common forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from benchmarks.ablation.paths import Path
from benchmarks.ablation.rules import Spot
from draft_service.engine import DraftEngine, Proposal
from training.evaluation import GuessedAnswer
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals

_session_ids = itertools.count(1)


def drafted(
    drafter: DraftEngine,
    paths: Sequence[Path],
    *,
    told: Callable[[Sampling], Sampling],
    width: int,
    takes_conditional: bool,
) -> list[GuessedAnswer[Spot]]:
    """The drafter's guesses after each token of each path but the last, in rows of `width`.

    The drafter commits a token a round, as it would where nothing is accepted. `told` is what it hears of a path's sampling.
    """
    sessions = [next(_session_ids) for _ in paths]
    for session, path in zip(sessions, paths, strict=True):
        drafter.start(session, path.prompt, told(path.sampling))
    said: list[list[Spot]] = [[] for _ in paths]
    for step in range(max(len(path.token_ids) for path in paths) - 1):
        going = [number for number, path in enumerate(paths) if step < len(path.token_ids) - 1]
        proposals = [_proposal(drafter, sessions[number], paths[number], step, width, takes_conditional) for number in going]
        for number, marginals in zip(going, drafter.propose(proposals), strict=True):
            said[number].append(_spot(marginals, paths[number], step, drafter.drafter.horizon))
    for session in sessions:
        drafter.release(session)
    return [GuessedAnswer(path.token_ids, tuple(spots)) for path, spots in zip(paths, said, strict=True)]


def _proposal(drafter: DraftEngine, session: int, path: Path, step: int, width: int, takes_conditional: bool) -> Proposal:
    """What follows token `step` of the answer: all features up to it are told, those of the prompt with the first."""
    length = len(path.prompt) + step + 1
    features = None
    if drafter.drafter.needs_features:
        assert path.features is not None, "a drafter that reads features is given a target that makes them"
        features = path.features[(length - 2 if step else 0) : length - 1]
    commit = Commit((path.token_ids[step],), length)
    return Proposal(session, commit, drafter.drafter.horizon, width, features, takes_conditional)


def _spot(marginals: Marginals, path: Path, step: int, horizon: int) -> Spot:
    following = slice(step + 1, step + 1 + horizon)
    return Spot(
        marginals,
        path.sampling.seed,
        path.sampling.temperature,
        len(path.prompt) + step,
        path.token_ids[following],
        path.probabilities[following],
    )
