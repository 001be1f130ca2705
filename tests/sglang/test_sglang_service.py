"""The verify service with the SGLang engine as a process: its ranks, its flags, several machines, and what ends it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire import wire
from treewire.core.tree import DraftTree
from treewire.runtime.channel import open_channel
from treewire.v1 import verify_pb2, verify_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    *("--max-total-tokens", "512", "--mem-fraction-static", "0.5", "--max-context", "96"),
    *("--max-tree-nodes", "9", "--max-sessions", "4", "--threads", "1"),
    *("--measure-prices", "off"),  # hundreds of interpreted steps
)
PROMPT = (3, 14, 15, 92)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model."""
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama", head_dim=16)


@contextmanager
def verify_process(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The verify service with the SGLang engine, killed at the latest at the end."""
    command = [sys.executable, "-m", "verify_service", "--engine", "sglang", "--model-path", str(folder), *SIZES, *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def ready_address(child: subprocess.Popen[str]) -> str:
    """The address in the one line that a service prints when it is ready."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.stderr and child.stderr.read()
    return str(json.loads(line)["address"])


def rank_processes(child: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks."""
    return [each for each in psutil.Process(child.pid).children() if "spawn_main" in " ".join(each.cmdline())]


async def session(address: str, trees: Sequence[DraftTree]) -> list[verify_pb2.VerifyResponse]:
    """One greedy session over the wire: its prompt, then these trees."""
    prompt = wire.token_ids_to_bytes(PROMPT)

    async def requests() -> AsyncIterator[verify_pb2.VerifyRequest]:
        yield verify_pb2.VerifyRequest(open=verify_pb2.VerifyOpen(protocol_version=1, prompt_token_ids=prompt))
        for tree in trees:
            yield verify_pb2.VerifyRequest(tree=wire.tree_to_message(tree))

    async with open_channel(address) as channel:
        return [response async for response in verify_pb2_grpc.VerifyServiceStub(channel).Verify(requests())]


def test_a_killed_rank_ends_the_process_with_an_error(folder: Path) -> None:
    """Rank 1 of two is killed while nobody calls: the service exits with 1, and no rank is left."""
    with verify_process(folder, "--tp-size", "2", "--bind", "127.0.0.1:0") as child:
        ready_address(child)
        ranks = rank_processes(child)
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)
        assert child.wait(120) == 1
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        assert child.stderr is not None
        assert "rank 1 ended with exit code -9" in child.stderr.read()


def test_ranks_end_with_their_service(folder: Path) -> None:
    """A service that is killed leaves no rank behind; one that is asked to stop exits with 0."""
    for number, exit_code in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        with verify_process(folder, "--bind", "127.0.0.1:0") as child:
            ready_address(child)
            (rank,) = rank_processes(child)
            child.send_signal(number)
            assert child.wait(120) == exit_code
            psutil.wait_procs([rank], timeout=120)
            assert not rank.is_running()


async def test_ranks_on_two_machines_are_one_target(folder: Path) -> None:
    """Two processes that each run one of two ranks answer as one rank does; the second ends with the first, with 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{listener.getsockname()[1]}"
    nodes = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", meeting)
    with (
        verify_process(folder, *nodes, "--node-rank", "1") as second,
        verify_process(folder, *nodes, "--node-rank", "0", "--bind", "127.0.0.1:0") as first,
        verify_process(folder, "--bind", "127.0.0.1:0") as alone,
    ):
        addresses = [await asyncio.to_thread(ready_address, each) for each in (first, alone)]
        answers = []
        for address in addresses:
            _, commit, *_ = await session(address, [])
            (root,) = commit.commit.token_ids
            *_, scored = await session(address, [DraftTree((root, 5, 6, 7), (-1, 0, 0, 1))])
            answers.append((root, list(scored.scored.posterior), list(scored.scored.commit.token_ids)))
        assert answers[0] == answers[1]
        assert len(answers[0][1]) == 4
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 120) == 0
        assert await asyncio.to_thread(second.wait, 120) == 0


async def test_the_target_is_described(folder: Path) -> None:
    """GetTarget tells the engine, its limits and the vocabulary."""
    with verify_process(folder, "--bind", "127.0.0.1:0", "--sglang-args", '{"allow_auto_truncate": true}') as child:
        address = await asyncio.to_thread(ready_address, child)
        async with open_channel(address) as channel:
            answer = await verify_pb2_grpc.VerifyServiceStub(channel).GetTarget(verify_pb2.GetTargetRequest())
        limits = answer.limits
        assert (limits.engine, limits.max_tree_nodes, limits.max_context) == ("sglang", 9, 96)
        assert limits.fingerprint.vocabulary_size == VOCABULARY_SIZE
        assert list(limits.end_token_ids) == [2]


@pytest.mark.parametrize(
    ("flags", "exit_code", "reason"),
    [
        (("--attention-backend", "torch_native"), 2, "torch_native cannot verify trees"),
        (("--sglang-args", '{"page_size": 16}'), 2, "page_size is 16"),
        (("--sglang-args", '{"tp_size": 2}'), 2, "use its own flags"),
        (("--sglang-args", "[1]"), 2, "not a JSON object"),
        (("--max-context", "255"), 2, "take at most 247"),
        (("--sglang-args", '{"no_such_argument": 1}'), 1, "no_such_argument, which sglang 0.5.23 does not know"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(folder: Path, flags: Any, exit_code: int, reason: str) -> None:
    """Whether the flags, the model or SGLang itself says no: an exit code, and the reason on standard error."""
    with verify_process(folder, "--bind", "127.0.0.1:0", *flags) as child:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == exit_code
        assert reason in errors
