"""This file is a compose stack under a name, image tags and ports of its own: made of a clean checkout, removed in the end."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

REPOSITORY = Path(__file__).resolve().parents[2]
CLEANUP_SECONDS = 180.0
SERVICES = ("draft", "verify", "gateway")
GATEWAY_PORT = 50050
HTTP_PORT = 8000
METRICS_PORT = 9090
_POLL_SECONDS = 0.2
_NUM_FREEZES = 5
_LOOK_SECONDS = 3.0
_FIRST_PORT, _LAST_PORT = 21_000, 31_000  # below those that the kernel hands out

NEEDS_ENGINE = """this check needs a running Docker engine with the compose plugin (v2), and `{command}` failed:
{reason}
Install Docker Engine from your distribution or from docs.docker.com/engine/install, start it, and see that
`docker info` and `docker compose version` work as this user."""

_opener = build_opener(ProxyHandler({}))  # containers are neighbours


class CheckFailedError(Exception):
    """A promise of the stack did not hold; the message says which."""


def require(holds: bool, otherwise: str) -> None:
    """CheckFailedError with the message `otherwise` unless it holds."""
    if not holds:
        raise CheckFailedError(otherwise)


@dataclass(frozen=True)
class Stack:
    """One compose project: where its files lie, under what name it runs, and when it must be done."""

    checkout: Path
    project: str
    environment: Mapping[str, str]
    deadline: float
    files: Sequence[str] = ("compose.yaml",)

    def with_file(self, file: str) -> Stack:
        """The same stack with one more compose file over the others."""
        return replace(self, files=(*self.files, file))

    def unhurried(self) -> Stack:
        """The same stack with time to clean up, however late it is."""
        return replace(self, deadline=time.monotonic() + CLEANUP_SECONDS)

    def run(self, *command: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout within what is left of the time; CheckFailedError when the time is up."""
        remaining_seconds = self.deadline - time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.checkout, env=self.environment, stdout=stdout, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=max(remaining_seconds, 0.0))
        except subprocess.TimeoutExpired as expired:
            raise CheckFailedError(f"the time of the check was up in `{' '.join(command)}`") from expired
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode, output)

    def compose(self, *arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` on this project."""
        files = [argument for file in self.files for argument in ("--file", file)]
        return self.run("docker", "compose", *files, "--project-name", self.project, *arguments, stdout=stdout)

    def docker(self, *arguments: str) -> str:
        """What a docker command prints; CheckFailedError if it fails."""
        done = self.run("docker", *arguments)
        require(done.returncode == 0, f"`docker {' '.join(arguments)}` exited with {done.returncode}")
        return done.stdout.strip()

    def build(self) -> None:
        """Build the images."""
        built = self.compose("--progress", "plain", "build", stdout=None)
        require(built.returncode == 0, "the images do not build")

    def up(self, replicas: int) -> None:
        """Start so many replicas of each service; returns when every one is healthy."""
        scale = [argument for service in SERVICES for argument in ("--scale", f"{service}={replicas}")]
        flags = ("--detach", "--no-build", "--wait", *scale)
        up = self.compose("--progress", "plain", "up", *flags, *SERVICES, stdout=None)
        require(up.returncode == 0, "the services do not become healthy")

    def containers(self, service: str, replicas: int) -> list[Container]:
        """The containers of a service, first to last."""
        return [Container(self, service, number) for number in range(1, replicas + 1)]


class Container:
    """One container, and what can be done to it. `num_losses` counts how often its callers lost it."""

    def __init__(self, stack: Stack, service: str, number: int) -> None:
        self.service = service
        self.number = number
        self.num_losses = 0
        self.hurting = asyncio.Lock()
        self._stack = stack

    @property
    def name(self) -> str:
        """As Docker calls it, without the project."""
        return f"{self.service}-{self.number}"

    @property
    def _full_name(self) -> str:
        return f"{self._stack.project}-{self.name}"

    @property
    def _network(self) -> str:
        return f"{self._stack.project}_treewire"

    def published(self, port: int) -> str:
        """Where a port of a gateway answers on this machine."""
        return self._stack.compose("port", "--index", str(self.number), self.service, str(port)).stdout.strip()

    def ports(self) -> str:
        """All that is published."""
        return self._stack.docker("port", self._full_name)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in it."""
        return self._stack.run("docker", "exec", self._full_name, "python", "-c", code)

    async def kill(self, seconds: float) -> None:
        """SIGKILL, and a start after a while."""
        self.num_losses += 1
        await self._docker("kill", "--signal", "KILL", self._full_name)
        await asyncio.sleep(seconds)
        await self._docker("start", self._full_name)
        await self.healthy()

    async def pause(self, seconds: float) -> None:
        """Freeze every process in it for a while."""
        await self._freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._docker("unpause", self._full_name)

    async def _freeze(self) -> None:
        """Pause it; the kernel refuses that now and then while a health check starts in it."""
        for _ in range(_NUM_FREEZES - 1):
            try:
                await self._docker("pause", self._full_name)
            except CheckFailedError:
                await asyncio.sleep(1.0)
            else:
                return
        await self._docker("pause", self._full_name)

    async def restart(self, seconds: float) -> None:
        """SIGTERM, its own time to end, and a start."""
        await self._docker("restart", self._full_name)
        await self.healthy()

    async def cut(self, seconds: float) -> None:
        """No network for a while; then it is back under the same name, perhaps at another address."""
        self.num_losses += 1
        await self._docker("network", "disconnect", self._network, self._full_name)
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._docker("network", "connect", "--alias", self.service, self._network, self._full_name)
        await self.healthy()

    async def healthy(self) -> None:
        """Return when Docker calls it healthy."""
        state = ""
        while state != "running healthy":
            await asyncio.sleep(_POLL_SECONDS)
            state = await self._docker("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", self._full_name)

    async def is_running(self) -> bool:
        """True while its process lives."""
        return await self._docker("inspect", "--format", "{{.State.Running}}", self._full_name) == "true"

    async def metrics(self) -> Metrics | None:
        """Where its metrics are; None while it has no network."""
        shown = await self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", self._full_name)
        address = json.loads(shown).get(self._network, {}).get("IPAddress")
        return Metrics(f"http://{address}:{METRICS_PORT}/metrics") if address else None

    async def metric(self, name: str) -> float:
        """The sum over the labels of one of its metrics; 0 if it does not answer."""
        metrics = await self.metrics()
        return 0.0 if metrics is None else await metrics.total(name) or 0.0

    async def _docker(self, *arguments: str) -> str:
        return await asyncio.to_thread(self._stack.docker, *arguments)


@dataclass(frozen=True)
class Metrics:
    """The metrics of a container, for as long as it keeps its address."""

    url: str

    async def total(self, name: str) -> float | None:
        """The sum over the labels of a metric, or one series of it; None if nobody answers."""
        text = await asyncio.to_thread(self._text)
        lines = [line for line in (text or "").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return None if text is None else sum(float(line.rpartition(" ")[2]) for line in lines)

    def _text(self) -> str | None:
        try:
            with _opener.open(self.url, timeout=_LOOK_SECONDS) as response:
                return str(response.read().decode())
        except OSError:
            return None


@contextmanager
def clean_stack(limit_seconds: float, replicas: int) -> Iterator[Stack]:
    """A stack of HEAD under a name, image tag and ports of its own; all of it is removed at the end."""
    project = f"treewire-check-{secrets.token_hex(4)}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TREEWIRE_", "COMPOSE_"))}
    ports = {"TREEWIRE_PORT": free_range(replicas), "TREEWIRE_HTTP_PORT": free_range(replicas)}
    with tempfile.TemporaryDirectory(prefix=project) as folder:
        checkout = Path(folder)
        _check_out_head(checkout)
        environment = {**inherited, **ports, "TREEWIRE_TAG": project}
        stack = Stack(checkout, project, environment, time.monotonic() + limit_seconds)
        try:
            yield stack
        except CheckFailedError:
            stack.unhurried().compose("logs", "--no-color", "--tail", "200", stdout=None)
            raise
        finally:
            stack.unhurried().compose("down", "--volumes", "--remove-orphans", "--rmi", "all", stdout=None)


def free_range(count: int) -> str:
    """Neighbouring ports of loopback that nobody listens on, as compose writes a range."""
    for _ in range(100):
        first = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with ExitStack() as opened:
            sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
            try:
                for number, each in enumerate(sockets):
                    each.bind(("127.0.0.1", first + number))
            except OSError:
                continue
        return f"{first}-{first + count - 1}" if count > 1 else str(first)
    raise CheckFailedError(f"no {count} neighbouring ports of loopback are free")


def require_engine() -> None:
    """CheckFailedError, with the way out, unless a Docker engine and its compose plugin answer."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise CheckFailedError(NEEDS_ENGINE.format(command=" ".join(command), reason=error)) from error
        require(answer.returncode == 0, NEEDS_ENGINE.format(command=" ".join(command), reason=answer.stderr.strip()))


def _check_out_head(destination: Path) -> None:
    """Put the files of HEAD, and nothing else, into `destination`."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(destination, filter="data")
