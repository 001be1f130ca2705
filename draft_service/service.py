"""This file is the draft service over gRPC: commits in, proposals for the engine thread, marginals out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from draft_service.engine import Drafter, FeatureReader, Proposal
from draft_service.sessions import DraftSession, Opening, fingerprint
from draft_service.step import Answer, Step, overloaded
from treewire import __version__, wire
from treewire.errors import InvalidRequest, Overloaded, Unsupported
from treewire.kv.pages import KvExhausted
from treewire.runtime.engine_thread import EngineThread
from treewire.runtime.metrics import DraftMetrics
from treewire.v1 import draft_pb2, draft_pb2_grpc, tree_pb2

_OVERLOAD_RETRY_SECONDS = 1.0


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Proposes continuations for many sessions in common steps of one drafter."""

    def __init__(
        self,
        step: Step,
        thread: EngineThread[Proposal, Answer],
        metrics: DraftMetrics,
        *,
        max_sessions: int,
    ) -> None:
        self._step = step
        self._thread = thread
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._sessions: set[int] = set()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    async def Draft(  # noqa: N802 - named by the contract
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """One session: open, then marginals for each commit, until the stream ends."""
        session = await self._opened(requests)
        self._admit(session)
        try:
            await self._call(partial(self._step.engine.start, session.id, session.opening.prompt, session.opening.sampling))
            yield draft_pb2.DraftResponse(accepted_open=limits(self._step.engine.drafter, session.opening))
            async for request in requests:
                if request.WhichOneof("event") == "features":
                    await self._take_in(session, request.features)
                else:
                    answer = await self._thread.submit(_proposal(session, request))
                    for block in wire.marginals_to_messages(answer.marginals):
                        yield draft_pb2.DraftResponse(marginals=block, step_seconds=answer.step_seconds)
        finally:
            self._release(session)

    async def GetDrafter(  # noqa: N802 - named by the contract
        self, request: draft_pb2.GetDrafterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GetDrafterResponse:
        """What the drafter is."""
        return draft_pb2.GetDrafterResponse(
            protocol_version=wire.PROTOCOL_VERSION,
            limits=limits(self._step.engine.drafter),
            num_sessions=self.num_sessions,
            version=__version__,
        )

    async def _opened(self, requests: AsyncIterator[draft_pb2.DraftRequest]) -> DraftSession:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("event") != "open":
            raise InvalidRequest("the first message of a session is open")
        drafter = self._step.engine.drafter
        opening = Opening.from_message(first.open, drafter)
        return DraftSession(drafter, opening, drafter.vocabulary_size or first.open.target.vocabulary_size)

    def _admit(self, session: DraftSession) -> None:
        if len(self._sessions) >= self._max_sessions:
            raise Overloaded(
                f"{len(self._sessions)} sessions are open, this service takes {self._max_sessions}",
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
        self._sessions.add(session.id)
        self._metrics.sessions.set(len(self._sessions))

    async def _take_in(self, session: DraftSession, message: tree_pb2.Features) -> None:
        """What a prompt's chunk brings is computed while the next one is on its way; what ends a prompt, or belongs to tokens
        that are still to come, waits for the commit behind it and is computed in the common step."""
        engine = self._step.engine
        if not isinstance(engine, FeatureReader):
            raise Unsupported("features: this drafter does not read context features", metadata={"field": "features"})
        session.waiting.append(session.features_from_message(message))
        if not message.last and session.num_features <= session.length:
            await self._call(partial(engine.take_in, session.id, session.take_waiting()))

    async def _call(self, call: Callable[[], None]) -> None:
        """Run it between steps. Overloaded if there is no room for what it needs."""
        try:
            await self._thread.call(call)
        except KvExhausted as error:
            raise overloaded(error) from error

    def _release(self, session: DraftSession) -> None:
        self._sessions.discard(session.id)
        self._metrics.sessions.set(len(self._sessions))
        self._thread.post(partial(self._step.engine.release, session.id))


def _proposal(session: DraftSession, request: draft_pb2.DraftRequest) -> Proposal:
    match request.WhichOneof("event"):
        case "commit":
            return session.proposal_from_message(request.commit)
        case "open":
            raise InvalidRequest("the session is open already")
        case _:
            raise InvalidRequest("a message of a session has a commit or features")


def limits(drafter: Drafter, opening: Opening | None = None) -> draft_pb2.DraftLimits:
    """What this drafter grants a session, or at most."""
    return draft_pb2.DraftLimits(
        horizon=opening.horizon if opening else drafter.horizon,
        width=opening.width if opening else drafter.width,
        max_context=drafter.max_context,
        needs_features=drafter.needs_features,
        fingerprint=fingerprint(drafter),
        engine=drafter.engine,
        max_prefixes=drafter.max_prefixes if opening is None or opening.takes_conditional else 0,
        branch_weights=wire.branch_weights_to_message(drafter.weights),
    )
