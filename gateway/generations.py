"""This file is a generation as every door runs it: understood, admitted, taken through the loop, counted, told as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from gateway.adaptive import AdaptiveBudget, Learned
from gateway.admission import Admission
from gateway.features import FeatureLog
from gateway.generation import Policy, generate
from gateway.merging import merged
from gateway.policy import HybridPolicy, SetWeights, TreePolicy
from gateway.quotas import Quotas
from gateway.requests import GenerationRequest, RequestLimits, parse
from gateway.rounds import RoundRecord, Rounds
from gateway.sessions import SessionRequest
from gateway.stopping import Emission, FinishReason, Stopping
from gateway.tokenization import Tokenization
from gateway.upstreams import Upstreams
from treewire.core.build import BranchWeights
from treewire.core.tree import Commit
from treewire.errors import Unavailable
from treewire.runtime.calls import current_call
from treewire.runtime.logging import get_logger
from treewire.runtime.metrics import GatewayMetrics
from treewire.runtime.tracing import Tracing
from treewire.types import Statistics
from treewire.v1 import generate_pb2, tree_pb2

_Value = TypeVar("_Value")
_log = get_logger()


@dataclass(frozen=True)
class Serving:
    """What the gateway serves, known once the target has been reached."""

    tokenization: Tokenization
    limits: RequestLimits
    model: str
    upstreams: Upstreams
    weights: SetWeights
    learned: Learned

    @property
    def branch_weights(self) -> BranchWeights:
        """What trees of generations that begin now are ranked by."""
        return self.weights.over(self.upstreams.drafter_weights)


@dataclass(frozen=True)
class Started:
    """The generation was admitted."""

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int


@dataclass(frozen=True)
class Advanced:
    """The prefill or a round gave tokens."""

    emission: Emission
    record: RoundRecord
    index: int = 0


@dataclass(frozen=True)
class Finished:
    """The end. `acceptance_counts[j]` is the number of rounds that emitted j drafted tokens; `num_output_tokens` counts those
    of this stream, not what was delivered before it."""

    reason: FinishReason
    stop: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    statistics: Statistics
    acceptance_counts: tuple[int, ...]
    index: int = 0


Event: TypeAlias = Started | Advanced | Finished


class _Prefill:
    """The prompt of a request on its way through the target: computed for the first generation, found there by the others."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.features: FeatureLog | None = None

    def end(self, session: SessionRequest) -> None:
        """The session has its first token; what it was told of the prompt is kept. Later calls change nothing."""
        if not self.ended.is_set():
            self.features = None if session.features is None else session.features.copy()
            self.ended.set()


class Generations:
    """Runs generations for callers, over whichever door they came."""

    def __init__(self, admission: Admission, metrics: GatewayMetrics, tracing: Tracing) -> None:
        self._admission = admission
        self._metrics = metrics
        metrics.watch_admission(lambda: admission.num_running, lambda: admission.num_queued)
        self._tracing = tracing
        self._quotas = Quotas()
        self._parsing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._started_serving: Serving | None = None

    def start(self, serving: Serving) -> None:
        """Serve this from now on; before it every call is Unavailable."""
        self._started_serving = serving

    @property
    def serving(self) -> Serving:
        """What is served. Unavailable before the target was met."""
        if self._started_serving is None:
            raise Unavailable("the gateway waits for its target", retry_after_seconds=1.0)
        return self._started_serving

    async def tokenized(self, work: Callable[[Tokenization], _Value]) -> _Value:
        """The result of work with the tokenizer, which may take milliseconds and is done beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work, self.serving.tokenization)

    async def understand(self, message: generate_pb2.GenerateRequest) -> GenerationRequest:
        """The request, checked against the limits of the gateway and of the caller."""
        limits = self.serving.limits.within(current_call().caller.limits)
        return await self.tokenized(lambda tokenization: parse(message, tokenization, limits))

    def run_all(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The generations that the request asks for, their events told apart by `index`; Started comes once.

        The first computes the prompt; the others begin when it has, and find the prompt's keys and values in the target.
        """
        prefill = _Prefill()
        return merged([self._run(generation, prefill) for generation in request.generations()])

    async def _run(self, request: GenerationRequest, prefill: _Prefill) -> AsyncGenerator[Event, None]:
        """One generation: Started if it is the first, Advanced as often as tokens come, Finished. Leaving early ends it.

        The first one ends `prefill` with its first tokens; the others wait for that, each in its place.
        """
        async with AsyncExitStack() as stack:
            tracer = stack.enter_context(self._tracing.generation(current_call(), self.serving.model))
            stack.enter_context(self._quotas.use(current_call().caller))
            with tracer.span("admission"):
                call = current_call()
                await stack.enter_async_context(self._admission.place(call.key, call.remaining_seconds))
                if request.index > 0:
                    await prefill.ended.wait()
            rounds = Rounds(tracer)
            if request.index == 0:
                yield self._started(request)
            stopping = Stopping(request.rules, self.serving.tokenization.decoder())
            resumed = _resumed(request, stopping)
            if resumed.finish_reason is not None:
                yield _finished(request, rounds, resumed, resumed.finish_reason)
                return
            session = self._session_request(request, rounds, prefill)
            emissions = self._emissions(request, session, stopping, rounds)
            async for emission in await stack.enter_async_context(aclosing(emissions)):
                prefill.end(session)
                record = rounds.emitted(emission)
                self._count(record, emission)
                yield Advanced(emission, record, request.index)
                if emission.finish_reason is not None:
                    finished = _finished(request, rounds, emission, emission.finish_reason)
                    tracer.note(finished.num_prompt_tokens, finished.num_output_tokens, finished.reason.value)
                    self._tell(finished)
                    yield finished

    def _session_request(self, request: GenerationRequest, rounds: Rounds, prefill: _Prefill) -> SessionRequest:
        return self.serving.upstreams.session_request(
            request,
            current_call(),
            rounds.trace,
            noise_weight=self.serving.branch_weights.noise,
            prompt_features=prefill.features,
        )

    def _emissions(
        self, request: GenerationRequest, session: SessionRequest, stopping: Stopping, rounds: Rounds
    ) -> AsyncGenerator[Emission, None]:
        upstreams = self.serving.upstreams
        verifying = upstreams.verify_session(session)
        drafting = upstreams.draft_session(
            session,
            budget=request.budget,
            width=request.width,
            on_lost=self._metrics.drafter_losses.inc,
            span=rounds.span,
        )
        if not (request.adapts and upstreams.has_drafter):
            policy = self._policy(request)
            return generate(rounds.verifying(verifying), rounds.drafting(drafting), rounds.policy(policy), stopping)
        adaptive = AdaptiveBudget(self.serving.learned, request, self._tree_policy(request), self.serving.limits.default_budget)
        return generate(
            rounds.verifying(adaptive.verifying(verifying)),
            rounds.drafting(adaptive.drafting(drafting)),
            rounds.policy(adaptive),
            stopping,
        )

    def _policy(self, request: GenerationRequest) -> Policy:
        if request.accept == tree_pb2.ACCEPTANCE_HYBRID and not request.sampling.is_greedy:
            return HybridPolicy(request.budget, request.length_limit, request.sampling, request.hybrid_width)
        return self._tree_policy(request)

    def _tree_policy(self, request: GenerationRequest) -> TreePolicy:
        return TreePolicy(request.budget, request.length_limit, request.sampling, self.serving.branch_weights)

    def _started(self, request: GenerationRequest) -> Started:
        return Started(
            request_id=current_call().request_id,
            model=self.serving.model,
            num_prompt_tokens=len(request.prompt) - len(request.delivered),
            seed=request.sampling.seed,
        )

    def _tell(self, finished: Finished) -> None:
        statistics = finished.statistics
        self._metrics.generations.labels(finished.reason.value).inc()
        self._metrics.time_to_first_token.observe(statistics.ttft_seconds)
        _log.info(
            "generation",
            finish_reason=finished.reason.value,
            prompt_tokens=finished.num_prompt_tokens,
            output_tokens=finished.num_output_tokens,
            rounds=statistics.rounds,
            lone_roots=statistics.lone_roots,
            seconds=round(statistics.total_seconds, 4),
        )

    def _count(self, record: RoundRecord, emission: Emission) -> None:
        if record.built is not None:
            self._metrics.observe_round(
                num_draft_tokens=record.built.tree.num_draft_tokens,
                num_accepted_tokens=record.num_accepted_tokens(emission),
                num_emitted_tokens=len(emission.token_ids),
            )
            self._metrics.observe_output_tokens(len(emission.token_ids), record.seconds)
        for stage, seconds in record.stage_seconds.items():
            self._metrics.stage_seconds.labels(stage).observe(seconds)


def _resumed(request: GenerationRequest, stopping: Stopping) -> Emission:
    """What was delivered before, as one emission, which the scanner has then seen."""
    if not request.delivered:
        return Emission((), ())
    return stopping.admit(Commit(request.delivered, len(request.prompt)))


def _finished(request: GenerationRequest, rounds: Rounds, emission: Emission, reason: FinishReason) -> Finished:
    statistics = rounds.statistics()
    return Finished(
        reason=reason,
        stop=emission.stop,
        num_prompt_tokens=len(request.prompt) - len(request.delivered),
        num_output_tokens=statistics.output_tokens,
        statistics=statistics,
        acceptance_counts=rounds.acceptance_counts,
        index=request.index,
    )
