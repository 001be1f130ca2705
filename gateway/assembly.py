"""This file is how the parts of the gateway are put together, for its process and for tests alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from gateway.adaptive import Learned
from gateway.admission import Admission
from gateway.failover import FailoverPatience
from gateway.generations import Generations, Serving
from gateway.openai.door import HttpDoor, http_door
from gateway.playground import routes as playground
from gateway.policy import SetWeights
from gateway.replicas import Location, Replicas
from gateway.requests import RequestLimits
from gateway.service import GenerateService
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from gateway.upstreams import Patience, Upstreams, meet_target
from treewire import wire
from treewire.runtime.channel import open_channel
from treewire.runtime.metrics import GatewayMetrics, Metrics
from treewire.runtime.tls import channel_credentials
from treewire.runtime.tracing import open_tracing
from treewire.v1 import draft_pb2, generate_pb2, generate_pb2_grpc, tree_pb2, verify_pb2

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
_VERIFY = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
_DRAFT = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
FALLBACK_BUDGET = 8
"""Nodes of a draft tree where the budget is to be adaptive and the target tells no prices."""

_NO_LIMIT = 2**31 - 1  # what the field of the contract holds


OpenUpstream = Callable[[str, Location], grpc.aio.Channel]


@dataclass(frozen=True)
class GatewayProcess:
    """The parts of one process. Until `warm_up` has met the target every call is Unavailable."""

    generations: Generations
    admission: Admission
    metrics: Metrics
    verify: Replicas
    draft: Replicas | None
    _settings: GatewaySettings
    _gateway_metrics: GatewayMetrics
    _load_tokenization: Callable[[], Tokenization]

    def register(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(GenerateService(self.generations), server)

    def http_door(self) -> AbstractAsyncContextManager[HttpDoor]:
        """The door at the address of the settings."""
        service = GenerateService(self.generations)
        page = playground.routes(service.messages, service.model)
        return http_door(self._settings, self.generations, self.metrics, routes=page, is_open=playground.is_page)

    async def warm_up(self) -> None:
        """Load the tokenizer, meet the target, and check that they belong together."""
        settings = self._settings
        tokenization = await asyncio.to_thread(self._load_tokenization)
        target = await meet_target(self.verify, patience_seconds=settings.target_timeout_seconds)
        ours = tree_pb2.Fingerprint(model=settings.model, tokenizer_hash=tokenization.hash)
        wire.check_fit(ours, target.fingerprint)
        patience = Patience(
            failover=FailoverPatience(
                num_attempts=settings.failover_attempts,
                outage_seconds=settings.failover_seconds,
                preempted_seconds=settings.preempted_seconds,
                admission_seconds=settings.max_wait_seconds,
            ),
            draft_seconds=settings.draft_timeout_seconds,
            prefill_seconds=settings.prefill_timeout_seconds,
            verify_seconds=settings.verify_timeout_seconds,
            horizon=settings.horizon,
            feature_bytes=settings.feature_bytes,
        )
        upstreams = Upstreams(self.verify, self.draft, target, patience, self._gateway_metrics)
        await upstreams.meet_drafter()
        limits = request_limits(settings, target, tokenization)
        weights = SetWeights(settings.log_prob_weight, settings.noise_weight)
        learned = Learned(max(1, limits.adaptive_budget))
        self.generations.start(Serving(tokenization, limits, settings.model, upstreams, weights, learned))


def request_limits(settings: GatewaySettings, target: verify_pb2.VerifyLimits, tokenization: Tokenization) -> RequestLimits:
    """What requests may ask for: the settings, within what the target takes."""
    max_budget = min(settings.max_budget, target.max_tree_nodes - 1)
    return RequestLimits(
        max_context=target.max_context,
        max_prompt_characters=settings.max_prompt_characters,
        max_prompt_tokens=settings.max_prompt_tokens or target.max_context,
        max_output_tokens=settings.max_output_tokens or _NO_LIMIT,
        max_budget=max_budget,
        default_budget=min(FALLBACK_BUDGET if settings.budget == "auto" else settings.budget, max_budget),
        adaptive_budget=min(settings.adaptive_budget, max_budget) if settings.budget == "auto" else 0,
        max_width=settings.width,
        default_max_tokens=settings.max_tokens,
        default_temperature=settings.temperature,
        vocabulary_size=target.fingerprint.vocabulary_size,
        end_token_ids=tuple(target.end_token_ids) or tokenization.end_token_ids,
    )


@asynccontextmanager
async def assemble(
    settings: GatewaySettings,
    load_tokenization: Callable[[], Tokenization],
    open_upstream: OpenUpstream | None = None,
) -> AsyncIterator[GatewayProcess]:
    """The gateway of these settings, with its channels for as long as the context lasts.

    `open_upstream` makes the channel to a replica of a service, where that is not reached over a network.
    """
    metrics = Metrics(settings.service)
    admission = Admission(
        max_running=settings.max_running, max_queued=settings.max_queued, max_wait_seconds=settings.max_wait_seconds
    )
    tracing = open_tracing(settings.trace_endpoint)
    gateway_metrics = GatewayMetrics.on(metrics.registry)
    generations = Generations(admission, gateway_metrics, tracing)
    async with AsyncExitStack() as stack:
        stack.callback(tracing.close)
        connect = open_upstream or _connected(settings)
        verify = await stack.enter_async_context(Replicas(settings.verify, _VERIFY, partial(connect, _VERIFY)).watched())
        draft = None
        if settings.draft:
            draft = await stack.enter_async_context(Replicas(settings.draft, _DRAFT, partial(connect, _DRAFT)).watched())
        gateway_metrics.watch_replicas(lambda: verify.num_available, lambda: draft.num_available if draft else 0)
        yield GatewayProcess(generations, admission, metrics, verify, draft, settings, gateway_metrics, load_tokenization)


def _connected(settings: GatewaySettings) -> OpenUpstream:
    """Channels over the network, with the token and the certificates of the settings."""
    certificates = settings.upstream_certificates
    tls = None if certificates is None else channel_credentials(certificates)
    token = settings.read_token()
    return lambda service, location: open_channel(location.address, token=token, tls=tls, server_name=location.server_name)
