"""This file is how the parts of the verify service are put together, for its process and for tests alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from tokenizers import Tokenizer

from treewire.runtime.engine_thread import EngineThread
from treewire.runtime.metrics import Metrics, VerifyMetrics
from treewire.v1 import verify_pb2, verify_pb2_grpc
from verify_service.engine import TargetEngine
from verify_service.price import Measure, no_prices
from verify_service.service import VerifyService
from verify_service.settings import VerifySettings
from verify_service.step import Answer, Step, Work
from verify_service.structures.compiler import StructureLimits
from verify_service.structures.grammars import Grammars

SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


@dataclass(frozen=True)
class VerifyProcess:
    """The parts of one process. The thread is to be entered before `warm_up`, which loads the engine on it."""

    service: VerifyService
    thread: EngineThread[Work, Answer]
    step: Step
    metrics: Metrics
    verify_metrics: VerifyMetrics
    grammars: Grammars

    def register(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self.service, server)

    async def warm_up(self) -> None:
        """Load the engine and run it once."""
        await self.thread.call(self.step.load)
        self.verify_metrics.watch_graphs(self.step.num_missed_graphs)
        for rank in self.step.engine.target.ranks:
            self.verify_metrics.observe_rank(rank.rank, weight_bytes=rank.weight_bytes, kv_bytes=rank.kv_bytes)


def unknown_tokenizer() -> Tokenizer:
    """The tokenizer of a target whose tokenizer is not known."""
    raise ValueError("the target's tokenizer is not known")


def assemble(
    settings: VerifySettings,
    build: Callable[[], TargetEngine],
    measure: Measure = no_prices,
    tokenizer: Callable[[], Tokenizer] = unknown_tokenizer,
) -> VerifyProcess:
    """The verify service of these settings over the engine that `build` makes and `measure` prices.

    `tokenizer` reads the target's when an output is to match a structure; ValueError where there is none.
    """
    metrics = Metrics(settings.service)
    verify_metrics = VerifyMetrics.on(metrics.registry)
    step = Step(build, measure=measure)
    thread = EngineThread(
        step,
        max_batch_size=settings.max_sessions,
        max_batch_cost=settings.max_step_tokens,
        cost=_num_tokens,
        name=settings.service,
        max_queue_length=settings.max_queue_length,
        on_step=verify_metrics.observe_step,
    )
    verify_metrics.watch_queue(lambda: thread.queue_length)
    limits = StructureLimits(
        max_characters=settings.max_structure_characters, compile_seconds=settings.structure_compile_seconds
    )
    grammars = Grammars(tokenizer, lambda: step.engine.target, limits)
    service = VerifyService(
        step,
        thread,
        verify_metrics,
        grammars,
        max_sessions=settings.max_sessions,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
    )
    return VerifyProcess(service, thread, step, metrics, verify_metrics, grammars)


def _num_tokens(work: Work) -> int:
    return work.num_tokens
