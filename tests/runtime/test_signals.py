"""A service as a process: its ready line, its signals, its exit codes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc
import psutil  # type: ignore[import-untyped]
import pytest

from tests.runtime.toy_service import NAME, until
from treewire.errors import Unavailable, from_rpc_error
from treewire.runtime.channel import open_channel

TOY = (sys.executable, "-m", "tests.runtime.toy_service")


class Process(NamedTuple):
    """A running toy service and its address."""

    handle: asyncio.subprocess.Process
    address: str

    async def exit_code(self) -> int:
        async with asyncio.timeout(30):
            return await self.handle.wait()


@asynccontextmanager
async def toy_process(*flags: str) -> AsyncIterator[Process]:
    handle = await asyncio.create_subprocess_exec(
        *TOY, "--bind", "127.0.0.1:0", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert handle.stdout is not None
        async with asyncio.timeout(60):
            ready = json.loads(await handle.stdout.readline())
        assert (ready["event"], ready["service"], ready["pid"]) == ("ready", "toy", handle.pid)
        yield Process(handle, ready["address"])
        assert await handle.stdout.read() == b""  # the ready line is alone on stdout
    finally:
        if handle.returncode is None:
            handle.kill()
            await handle.wait()


async def chat(channel: grpc.aio.Channel, message: bytes) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{NAME}/Chat")()
    await call.write(message)
    assert await call.read() == message
    return call


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_drains(number: signal.Signals) -> None:
    """A running stream finishes, new connections are refused, and the exit code is 0."""
    async with toy_process("--grace-seconds", "30") as toy, open_channel(toy.address) as channel:
        call = await chat(channel, b"before")
        toy.handle.send_signal(number)
        await until(lambda: refuses(toy.address))
        await call.write(b"after")
        assert await call.read() == b"after"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await toy.exit_code() == 0


async def test_a_second_signal_stops_at_once() -> None:
    """Long before the grace period ends a second signal ends the stream with Unavailable; the exit code is still 0."""
    async with toy_process("--grace-seconds", "600") as toy, open_channel(toy.address) as channel:
        call = await chat(channel, b"hello")
        toy.handle.terminate()
        await until(lambda: refuses(toy.address))
        toy.handle.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert isinstance(from_rpc_error(ended.value), Unavailable)
        assert await toy.exit_code() == 0


async def refuses(address: str) -> bool:
    """True if nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return True
    writer.close()
    return False


async def test_bad_settings_and_taken_ports_end_the_process() -> None:
    """A bad setting exits with 2 and one line, a taken port with 1 and the address in the log."""
    async with toy_process() as toy:
        for flags, code, said in ((["--bnd", "x"], 2, "--bind"), (["--bind", toy.address], 1, toy.address)):
            other = await asyncio.create_subprocess_exec(*TOY, *flags, stderr=asyncio.subprocess.PIPE)
            async with asyncio.timeout(60):
                _, error = await other.communicate()
            assert other.returncode == code
            assert said in error.decode()
        toy.handle.terminate()
        assert await toy.exit_code() == 0


async def test_a_service_can_end_with_its_parent() -> None:
    """With --exit-with-parent the service is gone soon after whoever started it was killed."""
    starter = "import subprocess, sys, time;subprocess.Popen([sys.executable, *sys.argv[1:]]);time.sleep(600)"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", starter, *TOY[1:], "--bind", "127.0.0.1:0", "--exit-with-parent", stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        pid = json.loads(await parent.stdout.readline())["pid"]
    assert pid != parent.pid
    parent.kill()
    await parent.wait()
    try:
        await until(lambda: ended(pid))
    finally:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)


def ended(pid: int) -> bool:
    """True if no such process runs; its corpse may remain."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
