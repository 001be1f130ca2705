"""This file is how the parts of the draft service are put together, for its process and for tests alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from draft_service.engine import DraftEngine, Proposal
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from draft_service.step import Answer, Step
from treewire.runtime.engine_thread import EngineThread
from treewire.runtime.metrics import DraftMetrics, Metrics
from treewire.v1 import draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


@dataclass(frozen=True)
class DraftProcess:
    """The parts of one process. The thread is to be entered before `warm_up`, which loads the engine on it."""

    service: DraftService
    thread: EngineThread[Proposal, Answer]
    step: Step
    metrics: Metrics

    def register(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self.service, server)

    async def warm_up(self) -> None:
        """Load the engine."""
        await self.thread.call(self.step.load)


def assemble(settings: DraftSettings, build: Callable[[], DraftEngine]) -> DraftProcess:
    """The draft service of these settings over the engine that `build` makes."""
    metrics = Metrics(settings.service)
    draft_metrics = DraftMetrics.on(metrics.registry)
    step = Step(build)
    thread = EngineThread(
        step,
        max_batch_size=settings.max_batch_size,
        name=settings.service,
        max_queue_length=settings.max_queue_length,
        on_step=draft_metrics.observe_step,
    )
    draft_metrics.watch_queue(lambda: thread.queue_length)
    return DraftProcess(DraftService(step, thread, draft_metrics, max_sessions=settings.max_sessions), thread, step, metrics)
