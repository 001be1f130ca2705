"""This file is the services behind the gateway: how a generation's sessions are opened on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import grpc
import stamina

from gateway.failover import FailoverPatience, Reason, ResilientVerifySession
from gateway.features import FeatureLog, FeaturesGone
from gateway.replicas import Replica, Replicas
from gateway.requests import GenerationRequest
from gateway.sessions import (
    DraftSession,
    DraftStream,
    NoDrafter,
    SessionRequest,
    Span,
    VerifySession,
    open_draft_stream,
    verify_session,
)
from treewire import wire
from treewire.core.build import BranchWeights
from treewire.core.hybrid import MAX_DRAWN_TOKENS
from treewire.costs import TargetCosts
from treewire.errors import Incompatible, Unavailable, from_rpc_error
from treewire.runtime.calls import Call, Trace
from treewire.runtime.logging import get_logger
from treewire.runtime.metrics import GatewayMetrics
from treewire.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc

_MEET_SECONDS = 5.0
_log = get_logger()


@dataclass(frozen=True)
class Patience:
    """How long the gateway waits for the services, in seconds; how far ahead it asks the drafter to look; and how many bytes of
    context features it keeps of a generation for a drafter that comes back."""

    failover: FailoverPatience
    draft_seconds: float
    prefill_seconds: float
    verify_seconds: float
    horizon: int
    feature_bytes: int


class Upstreams:
    """The replicas of one target and, unless it is None, those of a drafter.

    `drafter_weights` rank its branches, as the drafter that was last met tells; None if nothing was fitted to it.
    """

    def __init__(
        self,
        verify: Replicas,
        draft: Replicas | None,
        limits: verify_pb2.VerifyLimits,
        patience: Patience,
        metrics: GatewayMetrics,
    ) -> None:
        self._verify = verify
        self._draft = draft
        self._limits = limits
        self._patience = patience
        self._metrics = metrics
        self._drafter_reads_features = False
        self.drafter_weights: BranchWeights | None = None
        self._costs: WeakKeyDictionary[Replica, TargetCosts] = WeakKeyDictionary()  # forgotten with their replicas

    @property
    def target(self) -> tree_pb2.Fingerprint:
        """The target that the gateway met at its start; another one is refused at open."""
        return self._limits.fingerprint

    @property
    def has_drafter(self) -> bool:
        """True if there is a drafter to ask, whether or not it answers."""
        return self._draft is not None

    @property
    def horizon(self) -> int:
        """The deepest depth that the drafter is asked for."""
        return self._patience.horizon

    def session_request(
        self,
        request: GenerationRequest,
        call: Call,
        trace: Trace | None,
        *,
        noise_weight: float,
        prompt_features: FeatureLog | None = None,
    ) -> SessionRequest:
        """What both services are told of a generation whose trees give the shared noise this weight. Context features are
        asked for if the drafter, when last met, reads them; those of the prompt may be known from another generation."""
        wants_features = self._drafter_reads_features and request.budget > 0 and self.target.feature_size > 0
        features = FeatureLog(self._patience.feature_bytes) if prompt_features is None else prompt_features.copy()
        return SessionRequest(
            request.prompt,
            request.sampling,
            self.target,
            call.request_id,
            request.accept,
            request.num_log_probs,
            trees_aim_at_noise=noise_weight > 0 and request.accept != tree_pb2.ACCEPTANCE_HYBRID,
            takes_conditional=request.accept != tree_pb2.ACCEPTANCE_HYBRID or request.sampling.is_greedy,
            num_output_tokens=len(request.delivered),
            trace=trace,
            structure=request.structure,
            features=features if wants_features else None,
        )

    async def meet_drafter(self) -> None:
        """Learn what the drafter reads, if there is one and it answers; later its sessions tell."""
        if self._draft is None:
            return
        try:
            await self._draft.wait_available(_MEET_SECONDS)
            stub = draft_pb2_grpc.DraftServiceStub(self._draft.choose().channel)
            answer = await stub.GetDrafter(draft_pb2.GetDrafterRequest(), timeout=_MEET_SECONDS)
            self._note(answer.limits)
        except Unavailable as error:
            _log.info("drafter not met", reason=error.message)
        except grpc.aio.AioRpcError as error:
            _log.info("drafter not met", reason=from_rpc_error(error).message)
        except Incompatible as error:
            _log.warning("drafter not met", reason=error.message)

    def _note(self, limits: draft_pb2.DraftLimits) -> None:
        """Learn from what a drafter grants. Incompatible if its weights cannot be."""
        self.drafter_weights = wire.branch_weights_from_message(limits)
        self._drafter_reads_features = limits.needs_features

    def verify_session(self, request: SessionRequest) -> ResilientVerifySession:
        """A session on the target, whichever of its replicas it is on."""
        return ResilientVerifySession(self._verify, self._open_verify, request, self._patience.failover, self._count_failover)

    def _open_verify(self, replica: Replica, request: SessionRequest) -> AbstractAsyncContextManager[VerifySession]:
        return verify_session(
            replica.channel,
            request,
            self._costs.setdefault(replica, TargetCosts()),
            prefill_timeout_seconds=self._patience.prefill_seconds,
            round_timeout_seconds=self._patience.verify_seconds,
        )

    def _count_failover(self, reason: Reason) -> None:
        self._metrics.failovers.labels(reason.value).inc()

    def draft_session(
        self, request: SessionRequest, *, budget: int, width: int, on_lost: Callable[[], None], span: Span
    ) -> DraftSession | NoDrafter:
        """A session on the drafter; one that never proposes if there is none or the budget leaves no room. `span` is told of
        the messages that carry a prompt's features."""
        if self._draft is None or budget == 0:
            return NoDrafter()
        opening = partial(
            _open_draft,
            self._draft,
            request,
            horizon=min(self._patience.horizon, budget),
            width=min(width, _useful_width(request, budget)),
            on_limits=self._note,
        )
        return DraftSession(
            opening,
            request.prompt,
            timeout_seconds=self._patience.draft_seconds,
            on_lost=partial(_lost, request.request_id, on_lost),
            span=span,
        )


def _useful_width(request: SessionRequest, budget: int) -> int:
    """Tokens of one depth that a tree of this budget can make use of, and one more for the certificate."""
    return budget + (MAX_DRAWN_TOKENS if request.accept == tree_pb2.ACCEPTANCE_HYBRID else 1)


def _lost(request_id: str, on_lost: Callable[[], None], reason: str) -> None:
    on_lost()
    _log.warning("drafter lost", request_id=request_id, reason=reason)


async def _open_draft(
    replicas: Replicas,
    request: SessionRequest,
    tokens: tuple[int, ...],
    *,
    horizon: int,
    width: int,
    on_limits: Callable[[draft_pb2.DraftLimits], None],
) -> DraftStream:
    """A session on the least loaded drafter. One that serves other targets is left out from then on."""
    replica = replicas.choose()
    with ExitStack() as counted:
        counted.enter_context(replica.session())
        try:
            stream = await open_draft_stream(
                replica.channel, request, tokens, horizon=horizon, width=width, on_limits=on_limits
            )
        except FeaturesGone:  # this generation's lack, not the drafter's
            raise
        except Incompatible as error:
            replica.refuse()
            if replicas.num_available == 0:
                raise
            raise Unavailable(f"the drafter at {replica.address} does not fit: {error.message}") from error
        release = counted.pop_all().close
    stream.call.add_done_callback(lambda _: release())
    return stream


async def meet_target(replicas: Replicas, *, patience_seconds: float) -> verify_pb2.VerifyLimits:
    """What the target is and takes, as soon as a replica answers. Raises Unavailable if none does in time."""
    async for attempt in stamina.retry_context(
        on=Unavailable, attempts=None, timeout=patience_seconds, wait_initial=0.1, wait_max=1.0, wait_jitter=0.1
    ):
        with attempt:
            await replicas.wait_available(patience_seconds)
            stub = verify_pb2_grpc.VerifyServiceStub(replicas.choose().channel)
            try:
                answer = await stub.GetTarget(verify_pb2.GetTargetRequest(), timeout=_MEET_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
    wire.check_protocol_version(answer.protocol_version)
    return answer.limits
