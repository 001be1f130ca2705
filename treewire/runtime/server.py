"""This file is the lifetime of a service process: listen, warm up, be ready, drain, end with an exit code."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from treewire.errors import TreewireError, Unavailable
from treewire.runtime.endpoint import Endpoint
from treewire.runtime.interceptors import RpcInterceptor
from treewire.runtime.logging import configure_logging, get_logger
from treewire.runtime.metrics import Metrics
from treewire.runtime.settings import BadSettings, ServiceSettings
from treewire.runtime.tls import server_credentials

PROCESS = ""
"""The name under which health tells that the process is alive."""

_MIN_PING_INTERVAL_SECONDS = 5  # clients ping every 10 s
_KEEPALIVE_SECONDS = 30
_KEEPALIVE_TIMEOUT_SECONDS = 10
_UNTAKEN_SECONDS = 24 * 3600
_LAST_WORDS_SECONDS = 1.0  # for the statuses of RPCs that were ended
_PR_SET_PDEATHSIG = 1

_log = get_logger()


async def _nothing() -> None:
    """The warm-up of a service that needs none."""


class Door(Protocol):
    """Another way into the same process, which its owner opened before and closes after `serve`."""

    @property
    def name(self) -> str:
        """Its protocol, for the ready line."""

    @property
    def url(self) -> str:
        """Where it is."""

    def announce(self) -> None:
        """Tell that the service is ready."""

    async def drain(self, hurry: asyncio.Event, grace_seconds: float) -> None:
        """Take no more, let what runs finish within the grace period or until `hurry`, end the rest."""


class Server:
    """One process's gRPC server. Entering listens; leaving stops at once, unless it was drained before.

    Health has two levels: the process is SERVING while entered, `services` (full names) from `announce` on; neither after
    `fail` or from the first moment of `drain`.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        register: Callable[[grpc.aio.Server], None],
        services: Sequence[str],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._services = tuple(services)
        self._rpcs = RpcInterceptor(metrics, settings.keys(), settings.stalled_reader_seconds)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(interceptors=(self._rpcs,), options=_server_options(settings))
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection == "on" or (settings.reflection == "auto" and settings.listen.is_loopback):
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.endpoint = settings.listen
        """Where it listens; with the real port once entered."""

    @property
    def port(self) -> int:
        """The port it listens on; 0 on a Unix socket."""
        return self.endpoint.port

    async def __aenter__(self) -> Server:
        self.endpoint = self._bind()
        for service in self._services:
            await self._set_health(service, serving=False)
        await self._server.start()
        await self._set_health(PROCESS, serving=True)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(None)

    async def announce(self, doors: Sequence[Door] = ()) -> None:
        """Tell that the service is ready: health, and one JSON line on stdout for whoever supervises the process."""
        for service in self._services:
            await self._set_health(service, serving=True)
        ready = {"event": "ready", "service": self._settings.service, "address": str(self.endpoint), "pid": os.getpid()}
        for door in doors:
            door.announce()
            ready[door.name] = door.url
        print(json.dumps(ready), flush=True)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Take no more, let running RPCs finish within the grace period or until `hurry`, end the rest with Unavailable."""
        await self._health.enter_graceful_shutdown()
        grace_seconds = self._settings.grace_seconds
        stopping = asyncio.create_task(self._server.stop(grace_seconds + _LAST_WORDS_SECONDS))
        await _first_of(self._rpcs.wait_until_idle(), hurry.wait(), timeout_seconds=grace_seconds)
        await self._end_running(Unavailable("the server is shutting down"))
        await self._server.stop(None)
        await stopping

    async def fail(self, error: TreewireError) -> None:
        """Take no more and end every running RPC with `error`, now."""
        await self._health.enter_graceful_shutdown()
        await self._end_running(error)
        await self._server.stop(None)

    async def _end_running(self, error: TreewireError) -> None:
        self._rpcs.end_running(error)
        await _first_of(self._rpcs.wait_until_idle(), timeout_seconds=_LAST_WORDS_SECONDS)

    def _bind(self) -> Endpoint:
        asked = self.endpoint
        try:
            port = self._add_port(str(asked))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {asked}: is the address in use, or not of this machine?") from error
        return asked if asked.path else Endpoint(asked.host, port)

    def _add_port(self, address: str) -> int:
        certificates = self._settings.certificates
        if certificates is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(certificates))

    async def _set_health(self, service: str, *, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)


@dataclass(frozen=True)
class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second to stop at once."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve(
    settings: ServiceSettings,
    *,
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    metrics: Metrics,
    warm_up: Callable[[], Awaitable[None]] = _nothing,
    died: asyncio.Event | None = None,
    doors: Sequence[Door] = (),
) -> int:
    """Serve until a signal (0) or until `died`, which an EngineThread sets (1). A failing warm-up is 1 too.

    `doors` are announced and drained with the server.
    """
    died = died if died is not None else asyncio.Event()
    async with AsyncExitStack() as stack:
        try:
            signals = stack.enter_context(_caught_signals())
            server = await stack.enter_async_context(Server(settings, register=register, services=services, metrics=metrics))
            metrics.watch_tasks(asyncio.get_running_loop())
            if settings.metrics_bind:
                stack.enter_context(metrics.listening(Endpoint.parse(settings.metrics_bind)))
        except OSError as error:
            _log.error("cannot serve", reason=str(error))
            return 1
        if not await _warmed_up(warm_up, signals, died):
            return 0 if signals.first.is_set() else 1
        await server.announce(doors)
        await _first_of(signals.first.wait(), died.wait())
        if died.is_set():
            await server.fail(Unavailable(f"the {settings.service} engine died"))
            return 1
        draining = (door.drain(signals.second, settings.grace_seconds) for door in doors)
        await asyncio.gather(server.drain(signals.second), *draining)
        return 1 if died.is_set() else 0


def run(settings: ServiceSettings, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a service's `main` on an event loop of its own, uvloop's if it is installed; the process's exit code."""
    configure_logging(settings.log_level, settings.log_format)
    if settings.exit_with_parent:
        end_with_parent()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the thread that started this process ends. BadSettings anywhere but on Linux."""
    if not sys.platform.startswith("linux"):
        raise BadSettings(f"exit_with_parent needs Linux, this is {sys.platform}")
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def _server_options(settings: ServiceSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Without these two a client that pings a silent stream is sent away with "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # RPCs that a busy event loop has not taken yet wait for it, as long as their own deadlines let them. By default gRPC
        # drops those older than 30 s: their callers get CANCELLED, and no handler knows.
        ("grpc.server_max_unrequested_time_in_server", _UNTAKEN_SECONDS),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its connections unnoticed
    ]


async def _warmed_up(warm_up: Callable[[], Awaitable[None]], signals: _Signals, died: asyncio.Event) -> bool:
    """True once the warm-up is done; False if it failed, or a signal or the engine's death came first."""
    warming = asyncio.ensure_future(warm_up())
    await _first_of(asyncio.wait([warming]), signals.first.wait(), died.wait())
    if not warming.done():
        warming.cancel()
        await asyncio.wait([warming])
        return False
    error = warming.exception()
    if error is not None:
        _log.error("warm-up failed", exc_info=error)
    return error is None


async def _first_of(*awaited: Coroutine[Any, Any, Any], timeout_seconds: float | None = None) -> None:
    """Return when the first is done or the time is up; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in awaited]
    try:
        await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _caught_signals() -> Iterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.receive)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
