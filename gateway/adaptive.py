"""This file is one generation under an adaptive budget: its draft session and its policy, wrapped from outside the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, Self

from gateway.policy import TreePolicy
from gateway.requests import GenerationRequest
from treewire.core.build import BuiltTree
from treewire.core.speculation import RoundCosts, Speculation
from treewire.core.tree import Commit, Marginals
from treewire.costs import LONGEST_DRAFT, Average, TargetCosts
from treewire.v1 import verify_pb2

_MOST_TEMPERATURES = 20  # told apart, a tenth each


class ScoredVerifying(Protocol):
    """A session of the target that shows its last answer, and what rounds on its replica cost."""

    async def prefill(self) -> Commit:
        """The first token after the prompt."""

    async def verify(self, built: BuiltTree) -> Commit:
        """What the target accepts of a tree, and its bonus token."""

    @property
    def scored(self) -> verify_pb2.Scored | None:
        """The last answer to a tree."""

    @property
    def host_seconds(self) -> Mapping[str, float]:
        """Seconds of the last round that this end of the session took, by stage."""

    @property
    def costs(self) -> TargetCosts | None:
        """Those of the replica that the session is on; None while it is on none."""


class SkippingDrafting(Protocol):
    """A session of the draft service that may be left out in a round."""

    step_seconds: float | None

    async def __aenter__(self) -> Self:
        """Open it."""

    async def __aexit__(self, *exc: object) -> None:
        """End it."""

    async def ask(self, commit: Commit) -> None:
        """Have guesses made at what follows the commit; never waits for them."""

    def skip(self, commit: Commit) -> None:
        """Go on without guesses at what follows this commit."""

    async def propose(self) -> Marginals:
        """The guesses that were asked for; `step_seconds` is None if there was no answer."""


class _Use(NamedTuple):
    """How trees are used: what a drafter's probabilities are worth depends on it."""

    is_chain: bool
    temperature_tenths: int


class Learned:
    """What this gateway has learnt of its drafter: how far to trust it, by how its trees are used, and how long drafts take."""

    def __init__(self, max_budget: int) -> None:
        self._max_budget = max_budget
        self._speculations: dict[_Use, Speculation] = {}
        self.draft_seconds = Average()

    def speculation(self, request: GenerationRequest) -> Speculation:
        """That of generations like this one."""
        use = _Use(request.width == 1, min(round(10 * request.sampling.temperature), _MOST_TEMPERATURES))
        return self._speculations.setdefault(use, Speculation(self._max_budget))


class AdaptiveBudget:
    """Chooses in each round whether to draft and how many nodes to verify, and learns from what came of it.

    As long as the target tells no prices, trees have `fallback_budget` nodes.
    """

    def __init__(
        self,
        learned: Learned,
        request: GenerationRequest,
        policy: TreePolicy,
        fallback_budget: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._speculation = learned.speculation(request)
        self._draft_seconds = learned.draft_seconds
        self._policy = policy
        self._fallback_budget = fallback_budget
        self._clock = clock
        self._target: ScoredVerifying | None = None
        self._costs: RoundCosts | None = None
        self._draft_started: float | None = None
        self._num_drafts = 0

    def verifying(self, session: AbstractAsyncContextManager[ScoredVerifying]) -> AbstractAsyncContextManager[ScoredVerifying]:
        """The target's session, learnt from."""
        return _ObservedVerifying(session, self)

    def drafting(self, session: SkippingDrafting) -> _AdaptiveDrafting:
        """The drafter's session, which is asked in rounds where that is worth its time."""
        return _AdaptiveDrafting(session, self)

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        """The round's tree, of as many nodes as are worth their time."""
        built = self._policy.build(commit, marginals)
        if self._costs is None:
            return built.cut(min(self._fallback_budget, built.tree.num_draft_tokens))
        if self._draft_started is None:
            return built
        self._note_draft(self._clock() - self._draft_started)
        is_whole = self._policy.max_depth(commit) >= marginals.num_depths
        return built.cut(self._speculation.budget(built, self._costs, is_whole=is_whole))

    def asks(self) -> bool:
        """True if this round's draft is worth its time, as far as prices are known."""
        costs = None if self._target is None else self._target.costs
        self._costs = None
        if costs is not None:
            self._costs = costs.of_rounds(self._speculation.max_budget, self._draft_seconds.value(0.0))
        self._draft_started = None
        return self._costs is None or self._speculation.asks(self._costs)

    def wait_begins(self) -> None:
        """The round waits for its draft from now on."""
        self._draft_started = self._clock()

    def no_answer(self) -> None:
        """The drafter had none: nothing is learnt of it."""
        self._draft_started = None

    def on(self, target: ScoredVerifying) -> None:
        """Rounds are those of this session from now on."""
        self._target = target

    def observe(self, built: BuiltTree, scored: verify_pb2.Scored | None) -> None:
        """The tree was verified; one that a failover left unscored says nothing."""
        if scored is not None and scored.step_seconds > 0.0:
            self._speculation.observe(built, scored.accepted_nodes)

    def _note_draft(self, seconds: float) -> None:
        """A draft, and the tree made of it, held the round up so long. A generation's first one waits for the prefill."""
        self._num_drafts += 1
        if self._num_drafts > 1:
            self._draft_seconds.update(min(seconds, LONGEST_DRAFT * self._draft_seconds.value(seconds)))


class _AdaptiveDrafting:
    """A draft session that is asked only in some rounds."""

    def __init__(self, inner: SkippingDrafting, budget: AdaptiveBudget) -> None:
        self._inner = inner
        self._budget = budget
        self._asked = False
        self.step_seconds: float | None = None

    async def __aenter__(self) -> _AdaptiveDrafting:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(*exc)

    async def ask(self, commit: Commit) -> None:
        self._asked = self._budget.asks()
        if self._asked:
            await self._inner.ask(commit)
        else:
            self._inner.skip(commit)

    async def propose(self) -> Marginals:
        self.step_seconds = None
        if not self._asked:
            return Marginals.empty()
        self._budget.wait_begins()
        marginals = await self._inner.propose()
        self.step_seconds = self._inner.step_seconds
        if self.step_seconds is None:
            self._budget.no_answer()
        return marginals


class _ObservedVerifying:
    """A session of the target whose answers the budget learns from."""

    def __init__(self, session: AbstractAsyncContextManager[ScoredVerifying], budget: AdaptiveBudget) -> None:
        self._session = session
        self._budget = budget
        self._inner: ScoredVerifying

    async def __aenter__(self) -> _ObservedVerifying:
        self._inner = await self._session.__aenter__()
        self._budget.on(self._inner)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.__aexit__(*exc)  # type: ignore[arg-type]

    async def prefill(self) -> Commit:
        return await self._inner.prefill()

    async def verify(self, built: BuiltTree) -> Commit:
        commit = await self._inner.verify(built)
        self._budget.observe(built, self._inner.scored)
        return commit

    @property
    def scored(self) -> verify_pb2.Scored | None:
        return self._inner.scored

    @property
    def host_seconds(self) -> Mapping[str, float]:
        return self._inner.host_seconds

    @property
    def costs(self) -> TargetCosts | None:
        return self._inner.costs
