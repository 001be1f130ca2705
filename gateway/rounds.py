"""This file is what is known of a generation's rounds: stage times and counts, gathered round the loop from outside."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from gateway.failover import ResilientVerifySession
from gateway.generation import Drafting, Policy
from gateway.stopping import Emission
from treewire.core.build import BuiltTree
from treewire.core.tree import Commit, Marginals
from treewire.runtime.calls import Trace
from treewire.runtime.tracing import GenerationTracer
from treewire.types import Statistics
from treewire.v1 import verify_pb2


@dataclass
class RoundRecord:
    """One round as it happened. Without a tree it is the prefill."""

    stage_seconds: dict[str, float] = field(default_factory=dict)
    built: BuiltTree | None = None
    scored: verify_pb2.Scored | None = None
    commit: Commit | None = None

    def num_accepted_tokens(self, emission: Emission) -> int:
        """Drafted tokens among those that were emitted."""
        if self.scored is None:
            return 0
        return min(len(emission.token_ids), len(self.scored.accepted_nodes) - 1)


class Rounds:
    """Records a generation's rounds by wrapping the sessions and the policy that the loop is given; stages become spans.

    Every count derives from what was emitted: an accepted token behind the end of the generation does not count.
    """

    def __init__(self, tracer: GenerationTracer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tracer = tracer
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._stage_seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens_per_round: Counter[int] = Counter()
        self._accepted_per_round: Counter[int] = Counter()
        self._num_output_tokens = 0
        self._num_draft_tokens = 0
        self._num_lone_roots = 0
        self._num_certificate_violations = 0
        self.current = RoundRecord()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside towards a stage of the current round."""
        started = self._clock()
        try:
            with self._tracer.span(name):
                yield
        finally:
            seconds = self._clock() - started
            self._stage_seconds[name] += seconds
            self.current.stage_seconds[name] = self.current.stage_seconds.get(name, 0.0) + seconds

    @asynccontextmanager
    async def verifying(
        self, session: AbstractAsyncContextManager[ResilientVerifySession]
    ) -> AsyncIterator[_RecordedVerifying]:
        """The verify session, recorded."""
        async with session as verifying:
            yield _RecordedVerifying(verifying, self)

    @asynccontextmanager
    async def drafting(self, session: AbstractAsyncContextManager[Drafting]) -> AsyncIterator[_RecordedDrafting]:
        """The draft session, recorded."""
        async with session as drafting:
            yield _RecordedDrafting(drafting, self)

    def policy(self, policy: Policy) -> _RecordedPolicy:
        """The policy, recorded."""
        return _RecordedPolicy(policy, self)

    def emitted(self, emission: Emission) -> RoundRecord:
        """Close the round whose commit was emitted, and give its record."""
        now = self._clock()
        if self._first_token is None:
            self._first_token = now
        record, self.current = self.current, RoundRecord()
        self._num_output_tokens += len(emission.token_ids)
        if record.built is not None:
            num_drafted = record.built.tree.num_draft_tokens
            self._tokens_per_round[len(emission.token_ids)] += 1
            self._accepted_per_round[record.num_accepted_tokens(emission)] += 1
            self._num_draft_tokens += num_drafted
            self._num_lone_roots += num_drafted == 0
            self._num_certificate_violations += not record.built.exact
        return record

    @property
    def num_rounds(self) -> int:
        """Rounds after the prefill."""
        return sum(self._tokens_per_round.values())

    @property
    def ttft_seconds(self) -> float:
        """From admission to the first token; 0 before it."""
        return (self._first_token or self._started) - self._started

    @property
    def trace(self) -> Trace | None:
        """The position in the trace that the services are told."""
        return self._tracer.trace

    @property
    def acceptance_counts(self) -> tuple[int, ...]:
        """Rounds by the number of drafted tokens that were emitted, index 0 for none."""
        return tuple(self._accepted_per_round[count] for count in range(max(self._accepted_per_round, default=-1) + 1))

    def statistics(self) -> Statistics:
        """How speculation went."""
        longest = max(self._tokens_per_round, default=0)
        return Statistics(
            output_tokens=self._num_output_tokens,
            rounds=self.num_rounds,
            lone_roots=self._num_lone_roots,
            draft_tokens=self._num_draft_tokens,
            accepted_tokens=sum(count * rounds for count, rounds in self._accepted_per_round.items()),
            acceptance_histogram=tuple(self._tokens_per_round[count] for count in range(1, longest + 1)),
            ttft_seconds=self.ttft_seconds,
            total_seconds=self._clock() - self._started,
            stage_seconds=dict(self._stage_seconds),
            certificate_violations=self._num_certificate_violations,
        )


@dataclass(frozen=True)
class _RecordedVerifying:
    _inner: ResilientVerifySession
    _rounds: Rounds

    async def prefill(self) -> Commit:
        with self._rounds.stage("prefill"):
            return await self._inner.prefill()

    async def verify(self, built: BuiltTree) -> Commit:
        with self._rounds.stage("verify"):
            commit = await self._inner.verify(built)
        scored = self._inner.scored
        if scored is not None:
            built = built.grafted(scored.grafted_token_ids, scored.grafted_parents)
        self._rounds.current.built, self._rounds.current.commit = built, commit
        self._rounds.current.scored = scored
        return commit


@dataclass(frozen=True)
class _RecordedDrafting:
    _inner: Drafting
    _rounds: Rounds

    async def propose(self, commit: Commit) -> Marginals:
        with self._rounds.stage("draft"):
            return await self._inner.propose(commit)


@dataclass(frozen=True)
class _RecordedPolicy:
    _inner: Policy
    _rounds: Rounds

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        with self._rounds.stage("tree_build"):
            return self._inner.build(commit, marginals)
