"""This file is what is known of a generation's rounds: stage times and counts, gathered round the loop from outside."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gateway.adaptive import ScoredVerifying
from gateway.generation import Drafting, Policy
from gateway.stopping import Emission
from treewire.core.build import BuiltTree
from treewire.core.tree import Commit, Marginals
from treewire.runtime.calls import Trace
from treewire.runtime.tracing import GenerationTracer
from treewire.types import Statistics
from treewire.v1 import verify_pb2


class TimedDrafting(Drafting, Protocol):
    """A session of the draft service that tells what the last draft took of its step, None if there was no answer."""

    step_seconds: float | None


@dataclass
class RoundRecord:
    """One round as it happened. Without a tree it is the prefill.

    A stage with a dot in its name, as verify.step, is a part of the stage before the dot.
    """

    stage_seconds: dict[str, float] = field(default_factory=dict)
    built: BuiltTree | None = None
    scored: verify_pb2.Scored | None = None
    commit: Commit | None = None

    @property
    def seconds(self) -> float:
        """What the round took, beside what its caller took to read what it emitted."""
        return sum(seconds for stage, seconds in self.stage_seconds.items() if "." not in stage)

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
        self._rounds_by_nodes: Counter[int] = Counter()
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
            self.add(name, self._clock() - started)

    def add(self, stage: str, seconds: float) -> None:
        """Count so many seconds towards a stage of the current round."""
        self._stage_seconds[stage] += seconds
        self.current.stage_seconds[stage] = self.current.stage_seconds.get(stage, 0.0) + seconds

    def span(self, name: str) -> AbstractContextManager[None]:
        """What is done beside the stages, and counts towards none."""
        return self._tracer.span(name)

    @asynccontextmanager
    async def verifying(self, session: AbstractAsyncContextManager[ScoredVerifying]) -> AsyncIterator[_RecordedVerifying]:
        """The verify session, recorded."""
        async with session as verifying:
            yield _RecordedVerifying(verifying, self)

    @asynccontextmanager
    async def drafting(self, session: AbstractAsyncContextManager[TimedDrafting]) -> AsyncIterator[_RecordedDrafting]:
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
            self._rounds_by_nodes[num_drafted] += 1
            self._accepted_per_round[record.num_accepted_tokens(emission)] += 1
            self._num_draft_tokens += num_drafted
            self._num_lone_roots += num_drafted == 0
            self._num_certificate_violations += not record.built.exact
        return record

    def now(self) -> float:
        """Seconds on the clock that stages are timed with."""
        return self._clock()

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
        return _dense(self._accepted_per_round)

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
            rounds_by_nodes=_dense(self._rounds_by_nodes),
        )


def _dense(counts: Counter[int]) -> tuple[int, ...]:
    """The counts of 0, 1, ... up to the last that occurred."""
    return tuple(counts[number] for number in range(max(counts, default=-1) + 1))


@dataclass(frozen=True)
class _RecordedVerifying:
    _inner: ScoredVerifying
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
        parts = dict(self._inner.host_seconds)
        if scored is not None:
            parts |= {"step": scored.step_seconds, **{f"service_{name}": each for name, each in scored.stage_seconds.items()}}
        for name, seconds in parts.items():
            self._rounds.add(f"verify.{name}", seconds)
        return commit


@dataclass
class _RecordedDrafting:
    """The draft's stage is what the round waits for it, in asking and behind what was emitted meanwhile."""

    _inner: TimedDrafting
    _rounds: Rounds
    _asking_seconds: float = 0.0

    async def ask(self, commit: Commit) -> None:
        started = self._rounds.now()
        await self._inner.ask(commit)
        self._asking_seconds = self._rounds.now() - started

    async def propose(self) -> Marginals:
        with self._rounds.stage("draft"):
            marginals = await self._inner.propose()
        self._rounds.add("draft", self._asking_seconds)  # of this round, though asked before the last one was emitted
        self._rounds.add("draft.ask", self._asking_seconds)
        if self._inner.step_seconds is not None:
            self._rounds.add("draft.step", self._inner.step_seconds)
        return marginals


@dataclass(frozen=True)
class _RecordedPolicy:
    _inner: Policy
    _rounds: Rounds

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        with self._rounds.stage("tree_build"):
            return self._inner.build(commit, marginals)
