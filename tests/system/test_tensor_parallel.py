"""A target over several ranks in the whole stack: the same tokens; a rank that is killed is a target that is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.ngram import NgramDrafter
from gateway.tokenization import Tokenization
from tests.engines.ranks import Served, served
from tests.engines.test_tensor_parallel import SHAPE, check_same, one_rank, rounds
from tests.engines.tiny_drafters import save_dflash
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import draft_server, gateway_server, local_stack
from tests.system.test_processes import ROOT, process, ready_address
from treewire import AsyncClient, Sampling
from treewire.events import Chunk
from treewire.types import Generation, Options
from treewire.vocabulary import SIMULATED_END_TOKEN_ID
from verify_service.engine import TargetEngine

pytestmark = pytest.mark.timeout(600)

PROMPT = tuple(range(5, 40))
SAMPLINGS = [None, Sampling(temperature=1.0, seed=7), Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=8)]
SIZES = {"max_context": 256, "kv_tokens": 2048, "max_tree_nodes": 33, "kv_page_size": 8}


def request(**more: Any) -> Options:
    """A request for tokens alone."""
    return {"token_ids": PROMPT, "ignore_end": True, **more}  # type: ignore[typeddict-item]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 8 KV heads whose text never ends by itself."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), "qwen3", **SHAPE, eos_token_id=None)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that reads the target's features."""
    return save_dflash(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest, folder: Path, drafter: Path) -> Iterator[Served]:
    """The model on so many ranks."""
    with served(folder, request.param, **{**SIZES, "feature_projection": drafter}) as started:
        yield started


async def generated(target: TargetEngine, folder: Path, drafter: Path) -> list[tuple[int, ...]]:
    """Tokens of a batch of generations, drafted with features of the target."""
    async with local_stack(target, load_feature_drafter(drafter, folder)) as stack, stack.client() as client:
        tasks = [client.generate(**request(sampling=sampling, max_tokens=24, budget=12)) for sampling in SAMPLINGS]
        generations = await asyncio.gather(*tasks)
    assert all(generation.statistics.lone_roots <= 1 for generation in generations)
    return [tuple(generation.token_ids) for generation in generations]


async def test_ranks_are_one_target(ranks: Served, folder: Path, drafter: Path) -> None:
    """Greedy, seeded and truncated generations in one batch, trees from features of the target, pages of eight."""
    expected = await generated(one_rank(folder, drafter, **SIZES), folder, drafter)
    assert await generated(ranks.engine(), folder, drafter) == expected


def test_ranks_answer_as_one(ranks: Served, folder: Path, drafter: Path) -> None:
    """Log-probs and features to rounding, in batches of trees and chunks; no rank holds more than its share."""
    check_same(rounds(ranks.engine()), rounds(one_rank(folder, drafter, **SIZES)))
    whole = sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())
    tp_size = len(ranks.ready.memory)
    assert max(memory.weight_bytes for memory in ranks.ready.memory) < 1.5 * whole / tp_size
    kv_bytes = 2048 * 2 * 2 * (8 // tp_size) * 8 * 4
    assert [memory.kv_bytes for memory in ranks.ready.memory] == [kv_bytes] * tp_size


async def test_a_killed_rank_ends_its_service_and_moves_its_sessions(folder: Path) -> None:
    """Health flips, the process exits with 1, no rank stays; generations go on at the other replica, with the same tokens."""
    arguments = ["--model", str(folder), "--bind", "127.0.0.1:0", "--measure-prices", "off", "--threads", "1"]
    arguments += ["--max-context", "256", "--kv-tokens", "2048"]
    with (
        process("verify_service", *arguments) as single,
        process("verify_service", *arguments, "--tp-size", "2") as ranked,
    ):
        lone = await asyncio.to_thread(ready_address, single)
        shared = await asyncio.to_thread(ready_address, ranked)
        ranks = [each for each in psutil.Process(ranked.pid).children() if "multiprocessing.spawn" in " ".join(each.cmdline())]
        assert len(ranks) == 2
        async with (
            gateway_server(shared, "", Tokenization.simulated()) as undisturbed,
            AsyncClient(undisturbed.address) as client,
        ):
            expected = await client.generate(**request(max_tokens=60, sampling=SAMPLINGS[1]))
        async with (
            gateway_server(f"{shared},{lone}", "", Tokenization.simulated()) as gateway,
            AsyncClient(gateway.address) as client,
        ):
            killed = asyncio.Event()

            async def generate() -> tuple[int, ...]:
                async with client.stream(**request(max_tokens=60, sampling=SAMPLINGS[1])) as stream:
                    async for event in stream:
                        if isinstance(event, Chunk) and not killed.is_set():
                            killed.set()
                            os.kill(ranks[1].pid, signal.SIGKILL)
                    return tuple((await stream.final()).token_ids)

            tokens = await asyncio.gather(*(generate() for _ in range(4)))
        assert tokens == [tuple(expected.token_ids)] * 4
        assert await asyncio.to_thread(ranked.wait, 30) == 1
        health = [sys.executable, "-m", "treewire.health", "--address", shared, "--service", "treewire.v1.VerifyService"]
        assert subprocess.run(health, cwd=ROOT, capture_output=True, check=False).returncode == 1
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


async def test_structured_output_over_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    """Two ranks as a service, drafts and the compiler of structures beside them: the tokens of one rank, and they match."""
    tokenization, shape = Tokenization.simulated(512), {**SHAPE, "vocab_size": 512, "eos_token_id": SIMULATED_END_TOKEN_ID}
    folder = save_tiny_model(tmp_path, "qwen3", **shape)
    tokenization.tokenizer.save(str(folder / "tokenizer.json"))
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}, "kind": {"enum": ["oak", "elm"]}}}
    schema |= {"required": ["wet", "kind"], "additionalProperties": False}
    arguments = ["--model", str(folder), "--bind", "127.0.0.1:0", "--measure-prices", "off", "--threads", "1"]
    arguments += ["--max-context", "256", "--kv-tokens", "2048"]

    async def answers(address: str) -> list[Generation]:
        async with (
            draft_server(NgramDrafter(width=16)) as (drafter, _),
            gateway_server(address, drafter.address, tokenization) as gateway,
            AsyncClient(gateway.address) as client,
        ):
            structures: list[Options] = [{"regex": "(tree|leaf){6}"}, {"json_schema": schema}]
            tasks = [
                client.generate("grow a tree", sampling=sampling, max_tokens=100, budget=12, **structure)
                for structure in structures
                for sampling in (Sampling(temperature=0.0), SAMPLINGS[1])
            ]
            return await asyncio.gather(*tasks)

    with process("verify_service", *arguments, "--tp-size", "2") as ranked, process("verify_service", *arguments) as single:
        shared, alone = [await answers(await asyncio.to_thread(ready_address, each)) for each in (ranked, single)]
    assert [each.token_ids for each in shared] == [each.token_ids for each in alone]
    assert all(each.finish_reason == "stop" for each in shared)
    assert all(re.fullmatch("(tree|leaf){6}", each.text) for each in shared[:2])
    assert all(list(json.loads(each.text)) == ["wet", "kind"] for each in shared[2:])
    assert sum(each.statistics.accepted_tokens for each in shared) > 0
