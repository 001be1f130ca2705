"""This file is a local stack: draft service, verify service and gateway as three processes that live and end together.

    async with Stack(StackOptions(target="simulated", drafter="simulated", port=0)) as stack:
        ...  # the gateway answers at stack.address

Each process says where it listens with one JSON line on its standard output, `{"event": "ready", "address": ...}`, and
is taken as up once its health service says SERVING. The end of the block leaves no process behind.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treewire.checkpoint import CONFIG, names_architecture, read_config

HOST = "127.0.0.1"
DEFAULT_PORT = 50050
DEFAULT_HTTP_PORT = 8000
MAX_PORT = 2**16 - 1
ANY_PORT_ADDRESS = f"{HOST}:0"
NO_DRAFTER = "none"
SIMULATED = "simulated"
AUTO = "auto"
NGRAM = "ngram"
DFLASH = "dflash"
LOG_TAIL_LINES = 20
GRACE_SECONDS = 10.0
START_TIMEOUT_SECONDS = 1800.0  # the first start may fetch weights
POLL_SECONDS = 0.1
CHECK_TIMEOUT_SECONDS = 5.0
FIRST_RESTART_DELAY_SECONDS = 1.0
MAX_RESTART_DELAY_SECONDS = 30.0
MAX_LINE_BYTES = 2**20


class Service(Enum):
    """One of the three services; the value is its name."""

    DRAFT = "draft"
    VERIFY = "verify"
    GATEWAY = "gateway"

    @property
    def module(self) -> str:
        """The module that runs it."""
        return {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}[self.value]

    @property
    def health_name(self) -> str:
        """Its name in the health service."""
        return {
            "draft": "treewire.v1.DraftService",
            "verify": "treewire.v1.VerifyService",
            "gateway": "treewire.v1.GenerateService",
        }[self.value]


class State(Enum):
    """What a service of the stack has just come to."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"


class StackEvent(NamedTuple):
    """A service came to a state; `detail` says where it listens, or why it restarts."""

    service: Service
    state: State
    detail: str


class StackError(Exception):
    """The stack cannot start, or cannot go on. `log_tail` has the last log lines of the service behind it, if any."""

    def __init__(self, message: str, *, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log_tail = tuple(log_tail)


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What to run. Raises ValueError with value and limit.

    `target` and `drafter` are a model's name or path; a target may be "simulated", a drafter "ngram", "simulated", "none",
    "dflash" (the one that is shipped for the target), "auto" (that one, or "ngram" where none is shipped) or the directory
    of a drafter that reads the target's features. `port` is the gateway's, 0 takes any; `http_port` that of its HTTP door,
    None has no such door. `budget` is the nodes of each draft tree, root excluded, `threads` the CPU threads of the target,
    None leaves both to the services. `co_located` runs all three in one process, without a wire between them. `beam` is how
    many prefixes the drafter guesses from at each depth, for drafters that have conditional rows; None is their default. `logs`
    is the folder of the logs; None makes one, which is removed when the stack ends well.
    """

    target: str = "smollm2-135m"
    drafter: str = AUTO
    budget: int | None = None
    port: int = DEFAULT_PORT
    threads: int | None = None
    dtype: str = "float32"
    logs: Path | None = None
    http_port: int | None = None
    co_located: bool = False
    beam: int | None = None

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("http_port", self.http_port or 0)):
            if not 0 <= port <= MAX_PORT:
                raise ValueError(f"{name} is {port}, it must be from 0 to {MAX_PORT}")
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget is {self.budget}, it must be at least 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}, it must be at least 1")
        if self.beam is not None and self.beam < 1:
            raise ValueError(f"beam is {self.beam}, it must be at least 1")

    @property
    def chosen_drafter(self) -> str:
        """`drafter`, or what "auto" comes to for this target."""
        if self.drafter != AUTO:
            return self.drafter
        from treewire.weights import shipped_drafters

        return DFLASH if self.target in shipped_drafters() else NGRAM

    @property
    def has_drafter(self) -> bool:
        """True unless the stack runs without a draft service."""
        return self.drafter != NO_DRAFTER

    @property
    def feature_drafter(self) -> str | None:
        """Checkpoint of the drafter, name or directory, if it reads the target's features; None for every other drafter."""
        drafter = self.chosen_drafter
        if drafter == DFLASH:
            return self.target
        return drafter if _reads_features(Path(drafter).expanduser()) else None

    def draft_flags(self, bind: str) -> tuple[str, ...]:
        """Flags of a draft service that listens at `bind`."""
        beam = () if self.beam is None else ("--beam", str(self.beam))
        return ("--bind", bind, *self._draft_engine_flags(), *beam)

    def _draft_engine_flags(self) -> tuple[str, ...]:
        if self.chosen_drafter in (NGRAM, SIMULATED):
            return ("--engine", self.chosen_drafter)
        if self.feature_drafter is not None:
            return ("--engine", DFLASH, "--model", self.feature_drafter, "--target", self.target)
        return ("--engine", "causal-lm", "--model", self.drafter)

    def verify_flags(self) -> tuple[str, ...]:
        """Flags of the verify service."""
        if self.target == SIMULATED:
            return ("--bind", ANY_PORT_ADDRESS, "--engine", SIMULATED)
        model = ("--engine", "transformers", "--model", self.target, "--dtype", self.dtype)
        threads = () if self.threads is None else ("--threads", str(self.threads))
        features = () if self.feature_drafter is None else ("--feature-projection", self.feature_drafter)
        return ("--bind", ANY_PORT_ADDRESS, *model, *threads, *features)

    def colocated_flags(self) -> tuple[str, ...]:
        """Flags of all three services in one process: the gateway's, the verify service's and the drafter's, if any."""
        draft = ("--", *self.draft_flags(ANY_PORT_ADDRESS)) if self.has_drafter else ()
        return (*self._door_flags(), "--", *self.verify_flags(), *draft)

    def gateway_flags(self, draft_address: str, verify_address: str) -> tuple[str, ...]:
        """Flags of the gateway between the two; an empty draft address means no drafter."""
        return (*self._door_flags(), "--draft", draft_address, "--verify", verify_address)

    def _door_flags(self) -> tuple[str, ...]:
        """Flags of the gateway, whatever is behind it."""
        budget = () if self.budget is None else ("--budget", str(self.budget))
        http = () if self.http_port is None else ("--http-bind", f"{HOST}:{self.http_port}")
        return ("--bind", f"{HOST}:{self.port}", *http, "--model", self.target, *budget)


def _reads_features(directory: Path) -> bool:
    """True for the directory of a drafter's checkpoint whose drafter reads features."""
    if not (directory / CONFIG).is_file():
        return False
    return names_architecture(read_config(directory))


Command = Callable[[Service, Sequence[str]], Sequence[str]]


def service_command(service: Service, flags: Sequence[str]) -> Sequence[str]:
    """The command line of a service of this installation."""
    return (sys.executable, "-m", service.module, *flags, "--exit-with-parent", "--log-format", "json")


def colocated_command(service: Service, flags: Sequence[str]) -> Sequence[str]:
    """The command line of all three services in one process."""
    return (sys.executable, "-m", "colocated", "--exit-with-parent", "--log-format", "json", *flags)


class Stack:
    """A running stack: started by `async with`, healthy inside the block, gone after it.

    `on_event` is told what each service comes to; `command` makes a service's command line. StackError if a service dies
    while it starts, or the port is taken.
    """

    def __init__(
        self,
        options: StackOptions,
        *,
        on_event: Callable[[StackEvent], None] = lambda event: None,
        command: Command = service_command,
        grace_seconds: float = GRACE_SECONDS,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._options = options
        self._on_event = on_event
        self._command = command
        self._grace_seconds = grace_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._children: dict[Service, _Child] = {}
        self._logs: Path | None = options.logs

    @property
    def logs(self) -> Path:
        """The folder of the logs, one file a service."""
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="treewire-"))
        return self._logs

    @property
    def address(self) -> str:
        """Where the gateway listens, "host:port"."""
        return self._children[Service.GATEWAY].address

    @property
    def addresses(self) -> dict[Service, str]:
        """Where each service listens, "host:port"."""
        return {service: child.address for service, child in self._children.items()}

    @property
    def http_url(self) -> str:
        """Where the gateway's HTTP door is, "http://host:port"; empty without one."""
        return self._children[Service.GATEWAY].http_url

    @property
    def pids(self) -> dict[Service, int]:
        """Process id of each service."""
        return {service: child.pid for service, child in self._children.items()}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()
        if error is None and self._options.logs is None:
            shutil.rmtree(self.logs)

    async def wait(self) -> None:
        """Watches over the stack until cancelled: a draft service that dies is started again, at growing intervals.

        StackError as soon as the verify service or the gateway dies.
        """
        watches = [self._watch(service) for service in self._children if service is not Service.DRAFT]
        if Service.DRAFT in self._children:
            watches.append(self._keep_draft())
        await _all(*watches)

    async def _start(self) -> None:
        for port in (self._options.port, self._options.http_port):
            if port is not None:
                _check_port_is_free(port)
        self.logs.mkdir(parents=True, exist_ok=True)
        for service in Service:
            self._log(service).unlink(missing_ok=True)  # the logs are those of this stack alone
        if self._options.co_located:
            await self._launch(Service.GATEWAY, self._options.colocated_flags(), colocated_command)
            return
        starts = [self._launch(Service.VERIFY, self._options.verify_flags())]
        if self._options.has_drafter:
            starts.append(self._launch(Service.DRAFT, self._options.draft_flags(ANY_PORT_ADDRESS)))
        await _all(*starts)
        draft_address = self._children[Service.DRAFT].address if self._options.has_drafter else ""
        verify_address = self._children[Service.VERIFY].address
        await self._launch(Service.GATEWAY, self._options.gateway_flags(draft_address, verify_address))

    def _log(self, service: Service) -> Path:
        return self.logs / f"{service.value}.log"

    async def _launch(self, service: Service, flags: Sequence[str], command: Command | None = None) -> None:
        """Starts a service and waits until it serves. StackError if it dies before, or takes too long."""
        self._on_event(StackEvent(service, State.STARTING, ""))
        child = _Child(service, self._log(service))
        self._children[service] = child
        await child.start((command or self._command)(service, flags))
        if not await child.serves_within(self._start_timeout_seconds):
            await child.stop(self._grace_seconds)
            raise StackError(
                f"{service.value} did not serve within {self._start_timeout_seconds:g} s", log_tail=child.log_tail()
            )
        self._on_event(StackEvent(service, State.SERVING, child.address))

    async def _watch(self, service: Service) -> None:
        child = self._children[service]
        await child.ended()
        raise child.death()

    async def _keep_draft(self) -> None:
        """Starts the draft service again whenever it dies, where the gateway expects it."""
        flags = self._options.draft_flags(self._children[Service.DRAFT].address)
        delay_seconds = FIRST_RESTART_DELAY_SECONDS
        while True:
            child = self._children[Service.DRAFT]
            await child.ended()
            detail = f"{child.death()}; again in {delay_seconds:g} s, until then decoding goes on without drafts"
            self._on_event(StackEvent(Service.DRAFT, State.RESTARTING, detail))
            await asyncio.sleep(delay_seconds)
            try:
                await self._launch(Service.DRAFT, flags)
            except StackError:  # told by the next turn of the loop, since the child has ended
                delay_seconds = min(2 * delay_seconds, MAX_RESTART_DELAY_SECONDS)
            else:
                delay_seconds = FIRST_RESTART_DELAY_SECONDS

    async def _stop(self) -> None:
        """Ends all: the gateway first, so that it can finish what runs. What is left when cancelled is killed at once."""
        gateway = [child for service, child in self._children.items() if service is Service.GATEWAY]
        others = [child for service, child in self._children.items() if service is not Service.GATEWAY]
        try:
            for children in (gateway, others):
                await asyncio.gather(*(child.stop(self._grace_seconds) for child in children))
        finally:
            for child in self._children.values():
                child.kill()


class _Child:
    """The process of one service, with every process that it starts."""

    def __init__(self, service: Service, log: Path) -> None:
        self._service = service
        self._log = log
        self._ready: asyncio.Future[_Ready] = asyncio.get_running_loop().create_future()
        self._process: Process | None = None
        self._life: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens, once ready."""
        return self._ready.result().address

    @property
    def http_url(self) -> str:
        """Where its HTTP door is, once ready; empty without one."""
        return self._ready.result().http_url

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, "the child was started"
        return self._process.pid

    async def start(self, command: Sequence[str]) -> None:
        """Starts the process in a session of its own, so that a Ctrl-C reaches it through the stack alone."""
        read_end, write_end = os.pipe()  # not asyncio's own pipe: a worker that holds that one open would hold up wait()
        with FileIO(read_end) as output, FileIO(write_end, "w") as stdout, FileIO(self._log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=stdout, stderr=log, start_new_session=True
            )
            self._life = asyncio.create_task(self._live(self._process, os.dup(output.fileno())))

    async def serves_within(self, timeout_seconds: float) -> bool:
        """True once it serves, False if it does not in time. StackError if it ends before."""
        assert self._life is not None, "the child was started"
        serving = asyncio.create_task(self._serving())
        try:
            await asyncio.wait((serving, self._life), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._life.done():
                raise self.death()
            return serving.done()
        finally:
            serving.cancel()

    async def ended(self) -> None:
        """Returns once the process has ended and all of its output was read."""
        assert self._life is not None, "the child was started"
        await asyncio.wait((self._life,))

    def death(self) -> StackError:
        """The error of a process that ended although nobody asked."""
        assert self._process is not None, "the child was started"
        status = self._process.returncode
        how = f"was ended by signal {-status}" if status is not None and status < 0 else f"exited with status {status}"
        return StackError(f"{self._service.value} {how}; its log is {self._log}", log_tail=self.log_tail())

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the log."""
        return tuple(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    async def stop(self, grace_seconds: float) -> None:
        """Asks the process to end, and ends it after `grace_seconds`."""
        if self._process is None or self._life is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.wait((self._life,), timeout=grace_seconds)
        self.kill()
        await asyncio.wait((self._life,))

    def kill(self) -> None:
        """Ends the process and every process of its session at once, unless they have ended."""
        if self._process is not None and self._life is not None and not self._life.done():
            _kill_session(self._process.pid)

    async def _live(self, process: Process, output: int) -> None:
        """Takes the ready line, keeps the other output with the log, and lets no worker outlive the process."""
        reading = asyncio.create_task(self._read_output(output))
        await process.wait()
        _kill_session(process.pid)
        await reading

    async def _serving(self) -> None:
        await _until_serving((await self._ready).address, self._service.health_name)

    async def _read_output(self, output: int) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), FileIO(output)
        )
        with FileIO(self._log, "ab") as log, closing(transport):
            async for line in reader:
                ready = _ready(line)
                if ready is None:
                    log.write(line)
                elif not self._ready.done():
                    self._ready.set_result(ready)


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class _Ready(NamedTuple):
    """What a service says once it is ready; `http_url` is empty without an HTTP door."""

    address: str
    http_url: str


def _ready(line: bytes) -> _Ready | None:
    """What a ready line says; None for any other line."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("event") != "ready":
        return None
    address = message.get("address")
    return _Ready(address, str(message.get("http", ""))) if isinstance(address, str) else None


async def _until_serving(address: str, health_name: str) -> None:
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=health_name)
        is_serving = await _is_serving(stub, request)
        while not is_serving:
            await asyncio.sleep(POLL_SECONDS)
            is_serving = await _is_serving(stub, request)


async def _is_serving(stub: health_pb2_grpc.HealthStub, request: health_pb2.HealthCheckRequest) -> bool:
    try:
        response = await stub.Check(request, timeout=CHECK_TIMEOUT_SECONDS)
    except grpc.RpcError:  # not yet: it listens before it can answer, or before the service is registered
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def _all(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all; the first StackError ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except* StackError as failures:
        first = failures.exceptions[0]
    else:
        return
    raise first


def _check_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise StackError(f"port {port} of {HOST} is taken; choose another, or 0 for any that is free") from error
