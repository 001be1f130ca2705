"""This file is the gateway's ends of the two session streams: one that must hold, one that may be lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import stamina

from gateway.features import FeatureLog, FeaturesGone, num_positions
from treewire import wire
from treewire.core.build import BuiltTree
from treewire.core.sampling import Sampling
from treewire.core.structure import Structure
from treewire.core.tree import Commit, Marginals
from treewire.costs import TargetCosts
from treewire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TreewireError,
    Unavailable,
    from_rpc_error,
)
from treewire.runtime.calls import Trace
from treewire.runtime.channel import Metadata, call_metadata
from treewire.runtime.logging import get_logger
from treewire.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc

_PASSING = (Unavailable, Overloaded, DeadlineExceeded, InternalError, InvalidRequest)
_log = get_logger()

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True)
class SessionRequest:
    """What both services are told when a session opens: the same prompt, the same sampling, the same target and rule.

    The last `num_output_tokens` of the prompt count as output. With `num_log_probs` the target tells the log-prob of each
    committed token, and so many of the likeliest tokens. `features` is where the target's context features go, and the
    drafter's come from; None if the drafter reads none. `takes_conditional` tells whether trees are built from the rows of
    prefixes too. The output matches `structure`, if there is one.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    target: tree_pb2.Fingerprint
    request_id: str
    accept: tree_pb2.Acceptance.ValueType = tree_pb2.ACCEPTANCE_SHARED_NOISE
    num_log_probs: int | None = None
    trees_aim_at_noise: bool = True
    takes_conditional: bool = True
    num_output_tokens: int = 0
    features: FeatureLog | None = None
    trace: Trace | None = None
    structure: Structure | None = None

    @property
    def metadata(self) -> Metadata:
        """What each call of the generation carries."""
        return call_metadata(request_id=self.request_id, trace=self.trace)


async def _read(call: grpc.aio.StreamStreamCall[_Request, _Response], service: str) -> _Response:
    """The next message of a stream; its failure or its end as one of our errors."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    if response is grpc.aio.EOF:
        raise Unavailable(f"the {service} service ended the session")
    return response  # type: ignore[return-value]


async def _write(call: grpc.aio.StreamStreamCall[_Request, _Response], request: _Request, service: str) -> None:
    """Send a message; if the call has ended, the reason is read from it."""
    try:
        await call.write(request)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        await _read(call, service)
        raise InternalError(f"the {service} service takes no message") from error


@dataclass
class VerifySession:
    """An open session of the verify service. Every failure is an error of the generation."""

    call: grpc.aio.StreamStreamCall[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse]
    prefill_timeout_seconds: float
    round_timeout_seconds: float
    length: int
    vocabulary_size: int
    costs: TargetCosts
    features: FeatureLog | None = None
    scored: verify_pb2.Scored | None = None
    host_seconds: Mapping[str, float] = field(default_factory=dict)

    async def prefill(self) -> Commit:
        """The first token after the prompt. Features that come while the prefill runs are put where the drafter finds them."""
        async with _deadline(self.prefill_timeout_seconds, "prefill"):
            response = await self._answer()
        return self._committed(response.commit)

    async def verify(self, built: BuiltTree) -> Commit:
        """What the target accepts of the tree, and its bonus token. `scored` holds the whole answer, `host_seconds` the time
        that its two ends took to write and read messages."""
        started = time.perf_counter()
        request = verify_pb2.VerifyRequest(tree=wire.tree_to_message(built.tree))
        encoded = time.perf_counter()
        async with _deadline(self.round_timeout_seconds, "verify"):
            await _write(self.call, request, "verify")
            self.scored = (await self._answer()).scored
        answered = time.perf_counter()
        commit = self._committed(self.scored.commit)
        self.host_seconds = {"encode": encoded - started, "decode": time.perf_counter() - answered}
        self.costs.observe(self.scored, answered - started)
        return commit

    async def _answer(self) -> verify_pb2.VerifyResponse:
        """The next message that is not features; those before it are kept. Never waits for the drafter."""
        while (response := await _read(self.call, "verify")).WhichOneof("event") == "features":
            if self.features is not None:
                self.features.append(response.features)
        return response

    def _committed(self, message: tree_pb2.Commit) -> Commit:
        commit = wire.commit_from_message(message, previous_length=self.length, vocabulary_size=self.vocabulary_size)
        self.length = commit.length
        return commit


@contextlib.asynccontextmanager
async def _deadline(seconds: float, stage: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"the verify service did not answer a {stage} within {seconds:g} s") from error


@asynccontextmanager
async def verify_session(
    channel: grpc.aio.Channel,
    request: SessionRequest,
    costs: TargetCosts,
    *,
    prefill_timeout_seconds: float,
    round_timeout_seconds: float,
) -> AsyncIterator[VerifySession]:
    """A session of the verify service, from open to the end of its stream. `costs` are told its prices and its steps."""
    call = verify_pb2_grpc.VerifyServiceStub(channel).Verify(metadata=request.metadata)
    costs.num_sessions += 1
    try:
        opening = verify_pb2.VerifyOpen(
            protocol_version=wire.PROTOCOL_VERSION,
            target=request.target,
            prompt_token_ids=wire.token_ids_to_bytes(request.prompt),
            sampling=wire.sampling_to_message(request.sampling),
            features=request.features is not None,
            first_feature_position=0 if request.features is None else min(request.features.stop, len(request.prompt)),
            accept=request.accept,
            num_log_probs=request.num_log_probs,
            num_output_tokens=request.num_output_tokens,
        )
        wire.set_structure(opening, request.structure)
        async with _deadline(prefill_timeout_seconds, "open"):
            await _write(call, verify_pb2.VerifyRequest(open=opening), "verify")
            limits = (await _read(call, "verify")).accepted_open
        costs.tell(limits.prices)
        yield VerifySession(
            call,
            prefill_timeout_seconds,
            round_timeout_seconds,
            len(request.prompt),
            limits.fingerprint.vocabulary_size,
            costs,
            request.features,
        )
    finally:
        costs.num_sessions -= 1
        call.cancel()


Span = Callable[[str], AbstractContextManager[None]]


def _no_span(_: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass
class DraftStream:
    """An open session of the draft service, good for as long as nothing goes wrong on it.

    A drafter that reads features gets them from `features`, in order of position: those of all committed positions but the
    last ahead of each commit. `num_features` counts the positions that it has been sent. `max_prefixes` is the most that the
    conditional rows of a proposal may describe.
    """

    call: grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]
    limits: draft_pb2.DraftLimits
    length: int
    vocabulary_size: int
    features: FeatureLog | None = None
    max_prefixes: int = 0
    num_features: int = 0
    step_seconds: float = 0.0

    def takes(self, length: int) -> bool:
        """True if the drafter can follow a sequence of this length."""
        return length <= self.limits.max_context

    async def feed(self, stop: int, span: Span = _no_span) -> None:
        """Send the features of positions before `stop`, each as soon as the target has made it, at the drafter's own pace.
        `span` notes how long each message takes."""
        while self.features is not None and self.num_features < stop:
            message = await self.features.after(self.num_features)
            with span("features"):
                await _write(self.call, draft_pb2.DraftRequest(features=message), "draft")
            self.num_features += num_positions(message)

    async def propose(self, commit: Commit) -> Marginals:
        """Send a commit, behind its features, and read the blocks of its proposal. `step_seconds` holds what its step took."""
        await self.feed(commit.length - 1)
        await _write(self.call, draft_pb2.DraftRequest(commit=wire.commit_to_message(commit)), "draft")
        self.length = commit.length
        blocks: list[tree_pb2.Marginals] = []
        while not blocks or not blocks[-1].last:
            response = await _read(self.call, "draft")
            blocks.append(response.marginals)
            self.step_seconds = response.step_seconds
            if len(blocks) > max(1, self.limits.horizon + self.max_prefixes):
                most = f"{self.limits.horizon} depths and {self.max_prefixes} prefixes"
                raise InvalidRequest(f"the draft service sent {len(blocks)} blocks for {most}")
        return wire.marginals_from_messages(
            blocks,
            max_depths=self.limits.horizon,
            max_width=self.limits.width,
            vocabulary_size=self.vocabulary_size,
            max_prefixes=self.max_prefixes,
        )


async def open_draft_stream(
    channel: grpc.aio.Channel,
    request: SessionRequest,
    tokens: tuple[int, ...],
    *,
    horizon: int,
    width: int,
    on_limits: Callable[[draft_pb2.DraftLimits], None],
) -> DraftStream:
    """Open a session of the draft service that continues `tokens`; `on_limits` is told what it grants.

    Incompatible if the drafter reads features that are not at hand.
    """
    call = draft_pb2_grpc.DraftServiceStub(channel).Draft(metadata=request.metadata)
    try:
        opening = draft_pb2.DraftOpen(
            protocol_version=wire.PROTOCOL_VERSION,
            target=request.target,
            prompt_token_ids=wire.token_ids_to_bytes(tokens),
            sampling=wire.sampling_to_message(request.sampling),
            horizon=horizon,
            width=width,
            rank_with_noise=request.trees_aim_at_noise,
            takes_conditional=request.takes_conditional,
        )
        await _write(call, draft_pb2.DraftRequest(open=opening), "draft")
        limits = (await _read(call, "draft")).accepted_open
        on_limits(limits)
        if limits.needs_features and request.features is None:
            raise FeaturesGone(f"drafter {limits.fingerprint.model} reads features, which this generation did not ask for")
    except BaseException:
        call.cancel()
        raise
    features = request.features if limits.needs_features else None
    max_prefixes = min(limits.max_prefixes, wire.MAX_PREFIXES) if request.takes_conditional else 0
    return DraftStream(call, limits, len(tokens), request.target.vocabulary_size, features, max_prefixes)


class DraftSession:
    """Proposals for one generation from a drafter that may be absent, slow, dead or wrong: then there are none.

    The stream opens in the background while the target's prefill runs, and takes the prompt's features as they come. When it
    is lost, a new one is opened in the background from the committed prefix and its features, with back-off; the generation
    goes on with lone roots meanwhile. Without all of those features there is no new one. `span` is told of each message of
    features that a new stream is fed.
    """

    def __init__(
        self,
        open_stream: Callable[[tuple[int, ...]], Awaitable[DraftStream]],
        prompt: tuple[int, ...],
        *,
        timeout_seconds: float,
        on_lost: Callable[[str], None],
        span: Span = _no_span,
    ) -> None:
        self._open_stream = open_stream
        self._span = span
        self._tokens = list(prompt)
        self._timeout_seconds = timeout_seconds
        self._on_lost = on_lost
        self._num_losses = 0
        self._opening: asyncio.Task[DraftStream] | None = None
        self._asked: asyncio.Task[Marginals] | None = None
        self.step_seconds: float | None = None

    async def __aenter__(self) -> DraftSession:
        self._opening = asyncio.create_task(self._fed_stream())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.cancel()
        self._close()

    async def ask(self, commit: Commit) -> None:
        """Send the commit, and those that were skipped, for guesses at what follows: if the drafter is at hand, now."""
        self.skip(commit)
        self._asked = asyncio.create_task(self._answer(commit.length))
        await asyncio.sleep(0)  # the task begins, and comes as far as the sent message

    def skip(self, commit: Commit) -> None:
        """Go on without guesses at what follows this commit."""
        self._tokens.extend(commit.token_ids)

    async def propose(self) -> Marginals:
        """What was asked for; empty if the drafter has no guess in time. `step_seconds` holds what its step took, None if it
        did not answer."""
        assert self._asked is not None, "guesses are asked for first"
        return await self._asked

    async def _answer(self, length: int) -> Marginals:
        self.step_seconds = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._proposed(length)
        except TimeoutError:
            self._lose(f"no answer within {self._timeout_seconds:g} s")
        except TreewireError as error:
            self._lose(error.message, passing=isinstance(error, _PASSING))
        return Marginals.empty()

    async def _proposed(self, length: int) -> Marginals:
        if self._opening is None or (self._num_losses and not self._opening.done()):
            return Marginals.empty()
        stream = await asyncio.shield(self._opening)
        if not stream.takes(length):
            self._close()
            return Marginals.empty()
        marginals = await stream.propose(Commit(tuple(self._tokens[stream.length :]), length))
        self.step_seconds = stream.step_seconds
        return marginals

    async def _fed_stream(self) -> DraftStream:
        """A stream that continues the tokens committed by now, and has been sent what the drafter reads of them."""
        tokens = tuple(self._tokens)
        stream = await self._open_stream(tokens)
        try:
            await stream.feed(len(tokens) - 1, self._span)
        except BaseException:
            stream.call.cancel()
            raise
        return stream

    async def _reopened(self, delay_seconds: float) -> DraftStream:
        """A new stream, tried for until the drafter is back. It continues the tokens committed by then."""
        await asyncio.sleep(delay_seconds)
        async for attempt in stamina.retry_context(
            on=_PASSING, attempts=None, timeout=None, wait_initial=0.1, wait_max=5.0, wait_jitter=0.1
        ):
            with attempt:
                return await self._fed_stream()
        raise AssertionError("retrying without a limit ends only with a stream")

    def _lose(self, reason: str, *, passing: bool = True) -> None:
        self._on_lost(reason)
        self._close()
        self._num_losses += 1
        if passing:
            self._opening = asyncio.create_task(self._reopened(min(10.0, 0.05 * 2**self._num_losses)))

    def _close(self) -> None:
        """End the stream, or the attempt to open one. Never waits."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result().call.cancel()
        opening.cancel()


class NoDrafter:
    """The session of a gateway without a drafter: plain decoding in the same loop."""

    step_seconds: float | None = None

    async def __aenter__(self) -> NoDrafter:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def ask(self, commit: Commit) -> None:
        """There is nobody to ask."""

    def skip(self, commit: Commit) -> None:
        """There is nobody to leave out."""

    async def propose(self) -> Marginals:
        """No guess."""
        return Marginals.empty()
