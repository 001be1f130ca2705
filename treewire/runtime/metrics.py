"""This file is what the services count, under the names of DESIGN 8, and the HTTP endpoint that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from treewire.runtime.endpoint import Endpoint

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ACCEPTANCE_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_TREE_NODES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


class Metrics:
    """What every service counts, on a registry of its own; `service` is in treewire_service_info."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes and its like, on Linux
        Gauge("treewire_service_info", "Always 1.", ["service"], registry=self.registry).labels(service).set(1)
        self.rpcs = Counter("treewire_rpcs_total", "RPCs that ended.", ["method", "code"], registry=self.registry)

    def watch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the tasks of the event loop whenever the metrics are shown."""
        tasks = Gauge("treewire_tasks", "Tasks of the event loop.", registry=self.registry)
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    @contextmanager
    def listening(self, endpoint: Endpoint) -> Iterator[Endpoint]:
        """Serve /metrics while the block runs; yields where, with the real port."""
        if endpoint.path:
            raise ValueError(f"metrics are served over TCP, not on {endpoint}")
        server, thread = start_http_server(endpoint.port, endpoint.host, self.registry)
        try:
            yield Endpoint(endpoint.host, server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass(frozen=True)
class EngineMetrics:
    """What a service with an engine counts."""

    sessions: Gauge
    step_seconds: Histogram
    step_batch_size: Histogram
    engine_busy_seconds: Counter
    queue_length: Gauge

    @classmethod
    def on(cls, registry: CollectorRegistry) -> Self:
        """These metrics, registered."""
        return cls(
            sessions=_sessions(registry),
            step_seconds=Histogram("treewire_step_seconds", "Seconds of one engine call.", buckets=_SECONDS, registry=registry),
            step_batch_size=Histogram(
                "treewire_step_batch_size", "Items of one engine call.", buckets=_BATCH_SIZES, registry=registry
            ),
            engine_busy_seconds=Counter(
                "treewire_engine_busy_seconds_total", "Seconds spent in engine calls.", registry=registry
            ),
            queue_length=Gauge("treewire_queue_length", "Items that wait for the engine.", registry=registry),
        )

    def observe_step(self, batch_size: int, seconds: float) -> None:
        """Count one step: the `on_step` of an EngineThread."""
        self.step_seconds.observe(seconds)
        self.step_batch_size.observe(batch_size)
        self.engine_busy_seconds.inc(seconds)

    def watch_queue(self, queue_length: Callable[[], float]) -> None:
        """Read the queue's length from `queue_length` whenever the metrics are shown."""
        self.queue_length.set_function(queue_length)


class DraftMetrics(EngineMetrics):
    """What the draft service counts."""


class VerifyMetrics(EngineMetrics):
    """What the verify service counts."""


@dataclass(frozen=True)
class GatewayMetrics:
    """What the gateway counts. Counters are shaped as vLLM's: drafts, draft tokens, accepted tokens, and those by depth."""

    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    accepted_tokens_per_depth: Counter
    acceptance_length: Histogram
    tree_nodes: Histogram
    lone_roots: Counter
    drafter_losses: Counter
    failovers: Counter
    replicas: Gauge
    stage_seconds: Histogram
    sessions: Gauge
    queued: Gauge
    generations: Counter
    time_to_first_token: Histogram
    time_per_output_token: Histogram

    @classmethod
    def on(cls, registry: CollectorRegistry) -> Self:
        """These metrics, registered."""
        return cls(
            drafts=Counter("treewire_drafts_total", "Trees with more than a root.", registry=registry),
            draft_tokens=Counter("treewire_draft_tokens_total", "Nodes of trees, roots excluded.", registry=registry),
            accepted_tokens=Counter("treewire_accepted_tokens_total", "Draft tokens that were emitted.", registry=registry),
            accepted_tokens_per_depth=Counter(
                "treewire_accepted_tokens_per_depth_total", "Emitted draft tokens by depth.", ["depth"], registry=registry
            ),
            acceptance_length=Histogram(
                "treewire_acceptance_length",
                "Tokens gained in a round, bonus included.",
                buckets=_ACCEPTANCE_LENGTHS,
                registry=registry,
            ),
            tree_nodes=Histogram(
                "treewire_tree_nodes",
                "Nodes of a round's tree, root excluded: the budget where the drafter gave as many.",
                buckets=_TREE_NODES,
                registry=registry,
            ),
            lone_roots=Counter("treewire_lone_roots_total", "Rounds of plain decoding.", registry=registry),
            drafter_losses=Counter(
                "treewire_drafter_losses_total", "Times that a generation lost its drafter.", registry=registry
            ),
            failovers=Counter(
                "treewire_failovers_total", "Times that a generation left its verify replica.", ["reason"], registry=registry
            ),
            replicas=Gauge("treewire_replicas", "Replicas that take sessions.", ["service"], registry=registry),
            stage_seconds=Histogram(
                "treewire_stage_seconds", "Seconds of a round's stage.", ["stage"], buckets=_SECONDS, registry=registry
            ),
            sessions=_sessions(registry),
            queued=Gauge("treewire_queued", "Generations that wait for a place.", registry=registry),
            generations=Counter("treewire_generations_total", "Generations that ended.", ["finish_reason"], registry=registry),
            time_to_first_token=Histogram(
                "treewire_time_to_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=registry
            ),
            time_per_output_token=Histogram(
                "treewire_time_per_output_token_seconds",
                "Seconds for each token after the first; a round's tokens share its time.",
                buckets=_SECONDS,
                registry=registry,
            ),
        )

    def watch_admission(self, num_running: Callable[[], float], num_queued: Callable[[], float]) -> None:
        """Count the generations whenever the metrics are shown."""
        self.sessions.set_function(num_running)
        self.queued.set_function(num_queued)

    def watch_replicas(self, num_verify: Callable[[], float], num_draft: Callable[[], float]) -> None:
        """Count the replicas whenever the metrics are shown."""
        self.replicas.labels("verify").set_function(num_verify)
        self.replicas.labels("draft").set_function(num_draft)

    def observe_round(self, *, num_draft_tokens: int, num_accepted_tokens: int, num_emitted_tokens: int) -> None:
        """Count one round by what was emitted: a tree of `num_draft_tokens` nodes beside the root gave
        `num_accepted_tokens` of the `num_emitted_tokens`, the rest is the bonus."""
        self.tree_nodes.observe(num_draft_tokens)
        if num_draft_tokens:
            self.drafts.inc()
            self.draft_tokens.inc(num_draft_tokens)
        else:
            self.lone_roots.inc()
        self.accepted_tokens.inc(num_accepted_tokens)
        for depth in range(1, num_accepted_tokens + 1):
            self.accepted_tokens_per_depth.labels(depth).inc()
        self.acceptance_length.observe(num_emitted_tokens)

    def observe_output_tokens(self, num_tokens: int, seconds: float) -> None:
        """Count `num_tokens` that came together `seconds` after the ones before: each took its share."""
        for _ in range(num_tokens):
            self.time_per_output_token.observe(seconds / num_tokens)


def _sessions(registry: CollectorRegistry) -> Gauge:
    return Gauge("treewire_sessions", "Sessions that are open.", registry=registry)
