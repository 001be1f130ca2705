"""The processes of a stack that chaos is let loose on: each at an address of its own, where it comes back."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from treewire.runtime.channel import open_channel
from treewire.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 180.0


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Process:
    """One service, started, hurt and started again at the same address. `num_deaths` counts its ends."""

    def __init__(self, module: str, flags: Sequence[str], log: Path) -> None:
        self.module = module
        port, metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.metrics_address = f"127.0.0.1:{metrics_port}"
        self.num_deaths = 0
        self.hurting = asyncio.Lock()
        self._flags = flags
        self._log = log
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it; returns when it says that it is ready."""
        command = [sys.executable, "-m", self.module, "--bind", self.address, "--metrics-bind", self.metrics_address]
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *command, *self._flags, "--exit-with-parent", cwd=ROOT, stdout=subprocess.PIPE, stderr=log
            )
        assert self._child.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = await self._child.stdout.readline()
        if b'"ready"' not in line:
            raise RuntimeError(f"{self.module} did not start; its log is {self._log}")

    async def kill(self) -> None:
        """End it at once, and start it again."""
        self.num_deaths += 1
        await self._end(signal.SIGKILL)
        await self.start()

    async def drain(self) -> None:
        """Ask it to end, wait until it has, and start it again."""
        await self._end(signal.SIGTERM)
        await self.start()

    async def pause(self, seconds: float) -> None:
        """Stop its clock for a while."""
        self.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it for good."""
        if self._child is not None and self._child.returncode is None:
            self.signal(signal.SIGCONT)
            await self._end(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        assert self._child is not None
        with suppress(ProcessLookupError):
            self._child.send_signal(number)

    async def _end(self, number: int) -> None:
        assert self._child is not None
        self.signal(number)
        await self._child.wait()

    async def metric(self, name: str) -> float:
        """The sum over the labels of a metric."""
        text = await asyncio.to_thread(_get, f"http://{self.metrics_address}/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def num_sessions(self) -> int:
        """Sessions that a draft or verify service has open."""
        async with open_channel(self.address) as channel:
            if self.module == "verify_service":
                target = await verify_pb2_grpc.VerifyServiceStub(channel).GetTarget(verify_pb2.GetTargetRequest(), timeout=10)
                return int(target.num_sessions)
            drafter = await draft_pb2_grpc.DraftServiceStub(channel).GetDrafter(draft_pb2.GetDrafterRequest(), timeout=10)
            return int(drafter.num_sessions)


def _get(url: str) -> str:
    with urlopen(url, timeout=10) as response:  # loopback, our own process
        return str(response.read().decode())
