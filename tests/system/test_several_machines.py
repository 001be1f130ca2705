"""Ranks on two machines, as two network namespaces with a cable between them: one target, started and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.tokenization import Tokenization
from tests.engines.test_tensor_parallel import SHAPE
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import gateway_server, local_stack
from tests.system.test_processes import ROOT, ready_address
from tests.system.test_tensor_parallel import SAMPLINGS, request
from treewire import AsyncClient
from verify_service.engines.transformers import TransformersTarget

pytestmark = pytest.mark.timeout(600)

NAMES = (f"treewire-{os.getpid()}-0", f"treewire-{os.getpid()}-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
CABLE = (f"tw{os.getpid() % 100_000}a", f"tw{os.getpid() % 100_000}b")
PORT = 29_517


def ip(*arguments: str) -> None:
    """One command of iproute2; CalledProcessError with its words if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces that reach each other and nothing else; skips where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2, there is no `ip` here")
    made: list[str] = []
    try:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", CABLE[0], "netns", NAMES[0], "type", "veth", "peer", "name", CABLE[1], "netns", NAMES[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for name, end, address in zip(NAMES, CABLE, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield NAMES
    finally:
        for name in made:
            ip("netns", "delete", name)


@contextmanager
def machine(namespace: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A verify service in a namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "verify_service", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def two_machines(folder: Path, bind: Path, namespaces: tuple[str, str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One target over both, served by the first."""
    arguments = ["--model", str(folder), "--measure-prices", "off", "--threads", "1", "--bind", f"unix:{bind}"]
    arguments += ["--max-context", "256", "--kv-tokens", "2048"]
    arguments += ["--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"{ADDRESSES[0]}:{PORT}"]
    with (
        machine(namespaces[0], *arguments, "--node-rank", "0") as first,
        machine(namespaces[1], *arguments, "--node-rank", "1") as second,
    ):
        yield [first, second]


async def test_two_machines_are_one_target_and_end_as_one(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """The tokens are those of one rank. The loss of the second machine ends the first with 1; an orderly end is 0 on both."""
    folder, bind = save_tiny_model(tmp_path / "model", "llama", **SHAPE, eos_token_id=None), tmp_path / "verify.sock"
    async with local_stack(TransformersTarget.load(folder), with_drafter=False) as stack, stack.client() as client:
        expected = await client.generate(**request(max_tokens=20, sampling=SAMPLINGS[1]))
    with two_machines(folder, bind, namespaces) as (first, second):
        async with (
            gateway_server(ready_address(first), "", Tokenization.simulated()) as gateway,
            AsyncClient(gateway.address) as client,
        ):
            found = await client.generate(**request(max_tokens=20, sampling=SAMPLINGS[1]))
        assert found.token_ids == expected.token_ids
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) != 0
        assert first.wait(60) == 1
    with two_machines(folder, bind, namespaces) as (first, second):
        ready_address(first)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert second.wait(60) == 0
