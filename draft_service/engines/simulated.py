"""This file is the simulated drafter: it knows the simulated target's model and guesses it as well, or as badly, as asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draft_service.engine import Drafter, Proposal, SessionId
from draft_service.engines.admission import check_proposals, check_start, grant
from draft_service.engines.ranking import Row, rank_vocabulary, to_marginals
from treewire.core.history import History
from treewire.core.sampling import Sampling
from treewire.core.simulated import Prefix, SimulatedDeath, SimulatedModel, hashed_fraction
from treewire.core.tree import Marginals

_DISAGREEMENT_SALT = 1


@dataclass(frozen=True)
class DrafterFaults:
    """What goes wrong, by the number of the step (one call of `propose`), the first being 0.

    Every step takes `step_seconds`; `hang_steps` take `hang_seconds` more; `fail_steps` raise RuntimeError; every
    `malformed_every`-th answer has NaN for log-probs (0: none); from `die_at_step` on every call but `release` raises
    SimulatedDeath.
    """

    step_seconds: float = 0.0
    hang_steps: frozenset[int] = frozenset()
    hang_seconds: float = 0.0
    fail_steps: frozenset[int] = frozenset()
    malformed_every: int = 0
    die_at_step: int | None = None


@dataclass
class _Session:
    prefix: Prefix
    length: int
    sampling: Sampling
    history: History


@dataclass
class _Path:
    """A session's own guess as it grows: the prefix with the best token of each depth, and the rows so far."""

    prefix: Prefix
    position: int
    depths: int
    width: int
    sampling: Sampling
    history: History
    rows: list[Row]


class SimulatedDrafter:
    """Guesses the tokens of a `SimulatedModel` along the path of its own best guesses.

    After a prefix it has the model's own logits with probability `agreement`, decided by a hash of the prefix, and those of
    another model otherwise: the best token then is the target's about that often, at every depth.
    """

    def __init__(
        self,
        model: SimulatedModel,
        agreement: float = 0.8,
        horizon: int = 7,
        width: int = 16,
        max_context: int = 4096,
        tokenizer_hash: str = "",
        faults: DrafterFaults | None = None,
    ) -> None:
        if not 0.0 <= agreement <= 1.0:
            raise ValueError(f"agreement is {agreement}, it must be from 0 to 1")
        if horizon < 1 or not 1 <= width <= model.vocabulary_size:
            raise ValueError(f"horizon {horizon} and width {width} must be at least 1, width at most {model.vocabulary_size}")
        self._model = model
        self._other_model = SimulatedModel(model.vocabulary_size, model.seed + 1, model.end_token_id, model.mean_length)
        self._agreement = agreement
        self._faults = faults or DrafterFaults()
        self._drafter = Drafter("simulated", "simulated", model.vocabulary_size, tokenizer_hash, horizon, width, max_context)
        self._sessions: dict[SessionId, _Session] = {}
        self._num_steps = 0
        self._num_answers = 0

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold state."""
        return len(self._sessions)

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Hash the prompt."""
        self._check_alive()
        check_start(self.drafter, self._sessions, session, prompt)
        self._sessions[session] = _Session(Prefix.of(prompt), len(prompt), sampling, History(prompt))

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Hash each session's commit and guess on, all sessions depth by depth."""
        self._begin_step()
        check_proposals(self.drafter, self._sessions, proposals)
        paths = [self._follow(proposal) for proposal in proposals]
        while growing := [path for path in paths if len(path.rows) < path.depths]:
            self._grow(growing)
        return [self._answer(path) for path in paths]

    def release(self, session: SessionId) -> None:
        """Forget the session."""
        self._sessions.pop(session, None)

    def _follow(self, proposal: Proposal) -> _Path:
        session = self._sessions[proposal.session]
        session.prefix = session.prefix.extend(proposal.commit.token_ids)
        session.length = proposal.commit.length
        session.history.extend(proposal.commit.token_ids)
        granted = grant(self.drafter, proposal)
        sampling, history = session.sampling, session.history.copy()
        return _Path(session.prefix, session.length, granted.depths, granted.width, sampling, history, [])

    def _grow(self, paths: Sequence[_Path]) -> None:
        """One depth more for each path."""
        for path, logits in zip(paths, self._logits([path.prefix for path in paths]), strict=True):
            row = rank_vocabulary(logits, path.sampling, path.position + len(path.rows), path.width, path.history)
            path.rows.append(row)
            best = int(row.token_ids[0])
            path.prefix = path.prefix.extend([best])
            path.history.extend([best])

    def _logits(self, prefixes: Sequence[Prefix]) -> NDArray[np.float32]:
        agrees = np.array([hashed_fraction(prefix, _DISAGREEMENT_SALT) < self._agreement for prefix in prefixes])
        own, other = self._model.logits(prefixes), self._other_model.logits(prefixes)
        return np.where(agrees[:, np.newaxis], own, other)

    def _answer(self, path: _Path) -> Marginals:
        self._num_answers += 1
        marginals = to_marginals(path.rows)
        if self._faults.malformed_every and self._num_answers % self._faults.malformed_every == 0:
            marginals.log_probs.fill(np.nan)  # past the check of the constructor, as a broken peer would
        return marginals

    def _begin_step(self) -> None:
        step, faults = self._num_steps, self._faults
        self._num_steps += 1
        self._check_alive()
        time.sleep(faults.step_seconds + (faults.hang_seconds if step in faults.hang_steps else 0.0))
        if step in faults.fail_steps:
            raise RuntimeError(f"simulated fault in step {step}")

    def _check_alive(self) -> None:
        if self._faults.die_at_step is not None and self._num_steps > self._faults.die_at_step:
            raise SimulatedDeath(f"the simulated drafter died in step {self._faults.die_at_step}")
