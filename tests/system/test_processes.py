"""The stack as a user has it: processes of their own, started, used and stopped by the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from treewire import AsyncClient, Client
from treewire.errors import TreewireError
from treewire.stack import Stack, StackOptions

ROOT = Path(__file__).resolve().parents[2]
KEYS = "text token_ids finish_reason rounds mean_acceptance_length ttft_seconds tokens_per_second stage_seconds lone_roots"


def treewire(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "treewire", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A module run as a process, killed at the latest at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ready_address(child: subprocess.Popen[str]) -> str:
    """The address in the one line that a service prints when it is ready."""
    assert child.stdout is not None
    return str(json.loads(child.stdout.readline())["address"])


async def test_stack_of_processes_generates_and_leaves_nothing_behind() -> None:
    """Three processes, health-gated; the command line streams through them; all are gone afterwards."""
    async with Stack(StackOptions(target="simulated", drafter="simulated", port=0)) as stack:
        pids = list(stack.pids.values()) if isinstance(stack.pids, dict) else list(stack.pids)
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)
        result = await asyncio.to_thread(
            treewire, "generate", "hello", "--address", stack.address, "--json", "--max-tokens", "40"
        )
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        assert list(answer) == KEYS.split()
        assert len(answer["token_ids"]) == 40
        assert answer["mean_acceptance_length"] > 1
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_up_stops_everything_on_one_ctrl_c() -> None:
    """One SIGINT to `treewire up` ends its three services, and it exits with 0."""
    with process("treewire", "up", "--target", "simulated", "--drafter", "ngram", "--port", "0") as child:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(children) < 3:
            children = psutil.Process(child.pid).children(recursive=True)
            time.sleep(0.1)
        assert len(children) == 3
        time.sleep(1)
        child.send_signal(signal.SIGINT)
        child.wait(timeout=30)
        assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_25_dead_engine_flips_health_and_ends_the_process_with_an_error() -> None:
    """A verify service whose engine dies refuses what is in flight, is not healthy any more, and exits with 1."""
    with process("tests.system.dying_verify", "--bind", "127.0.0.1:0") as verify:
        address = await asyncio.to_thread(ready_address, verify)
        health = [sys.executable, "-m", "treewire.health", "--address", address, "--service", "treewire.v1.VerifyService"]
        assert subprocess.run(health, cwd=ROOT, capture_output=True, check=False).returncode == 0
        with process(
            "gateway",
            "--bind",
            "127.0.0.1:0",
            "--verify",
            address,
            "--draft",
            "",
            "--model",
            "simulated",
            "--failover-seconds",
            "1",
        ) as gateway:
            async with AsyncClient(await asyncio.to_thread(ready_address, gateway)) as client:
                started = time.monotonic()
                with pytest.raises(TreewireError):
                    await client.generate("hello", max_tokens=500, ignore_end=True, deadline_seconds=30)
                assert time.monotonic() - started < 20
        assert await asyncio.to_thread(verify.wait, 20) == 1
        assert subprocess.run(health, cwd=ROOT, capture_output=True, check=False).returncode == 1


def test_killed_gateway_is_unavailable_to_its_clients() -> None:
    """A client in mid-stream is told, and does not hang."""
    with process(
        "verify_service", "--engine", "simulated", "--simulated-step-seconds", "0.02", "--bind", "127.0.0.1:0"
    ) as verify:
        address = ready_address(verify)
        with process("gateway", "--bind", "127.0.0.1:0", "--verify", address, "--draft", "", "--model", "simulated") as gateway:
            with Client(ready_address(gateway)) as client, pytest.raises(TreewireError) as caught:
                with client.stream("hello", max_tokens=2000, ignore_end=True) as stream:
                    for number, _ in enumerate(stream):
                        if number == 5:
                            os.kill(gateway.pid, signal.SIGKILL)
            assert caught.value.reason == "UNAVAILABLE"


@pytest.mark.parametrize("module", ["gateway", "draft_service", "verify_service"])
def test_help_tells_defaults_and_unknown_flags_are_errors(module: str) -> None:
    """--help exits with 0 and shows defaults; an unknown flag exits with 2 and one line that names the nearest."""
    shown = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0
    assert "default: 127.0.0.1:5005" in shown.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", module, "--bindd", "x"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.strip().count("\n") == 0
    assert "--bind" in wrong.stderr


def test_service_on_a_public_address_needs_a_token() -> None:
    """A bind that other machines can reach is refused without a token, with the reason."""
    refused = subprocess.run(
        [sys.executable, "-m", "verify_service", "--engine", "simulated", "--bind", "0.0.0.0:0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "can be reached from other machines" in refused.stderr
