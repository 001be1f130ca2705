"""One pool of drafters in front of several targets: each gateway has a target of its own, all of them the same drafters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from draft_service.engine import DraftEngine
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.simulated import SimulatedDrafter
from gateway.tokenization import Tokenization
from tests.engines.tiny_drafters import save_recurrent
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import MODEL, Running, draft_server, gateway_server, local_stack, verify_server
from treewire import AsyncClient, Sampling
from treewire.core.simulated import SimulatedModel
from treewire.types import Generation
from verify_service.engine import TargetEngine
from verify_service.engines.simulated import SimulatedTarget
from verify_service.engines.transformers import TransformersTarget

PROMPT = tuple(range(5, 45))
SAMPLINGS = [None, Sampling(temperature=1.0, seed=7), Sampling(temperature=0.7, top_p=0.9, seed=8)]
NUM_TOKENS = 60


@asynccontextmanager
async def pool(
    drafters: Sequence[DraftEngine], targets: Sequence[TargetEngine], **gateway: Any
) -> AsyncIterator[tuple[list[Running], list[AsyncClient]]]:
    """The drafters' services, and for each target a client of its gateway, which knows all of the drafters."""
    async with AsyncExitStack() as lifetime:
        draft = [(await lifetime.enter_async_context(draft_server(drafter)))[0] for drafter in drafters]
        addresses = ",".join(running.address for running in draft)
        clients = []
        for target in targets:
            running, _ = await lifetime.enter_async_context(verify_server(target))
            door = await lifetime.enter_async_context(
                gateway_server(running.address, addresses, Tokenization.simulated(), **gateway)
            )
            clients.append(await lifetime.enter_async_context(AsyncClient(door.address)))
        yield draft, clients


async def generated(client: AsyncClient, sampling: Sampling | None) -> Generation:
    """A generation of this length whatever the text says."""
    return await client.generate(token_ids=PROMPT, sampling=sampling, max_tokens=NUM_TOKENS, ignore_end=True)


async def undisturbed(target: TargetEngine) -> list[Sequence[int]]:
    """The tokens that a target gives without any drafter."""
    async with local_stack(target, with_drafter=False) as stack, stack.client() as client:
        return [(await generated(client, sampling)).token_ids for sampling in SAMPLINGS]


async def test_two_targets_share_drafters_that_read_features(tmp_path: Path) -> None:
    """Two targets of one shape and one drafter: at the same time, each gives its own tokens, all of them drafted for."""
    paths = [save_tiny_model(tmp_path / f"target-{seed}", "llama", seed, eos_token_id=None) for seed in (0, 1)]
    drafter_path = save_recurrent(tmp_path / "drafter")
    expected = [await undisturbed(TransformersTarget.load(path)) for path in paths]
    assert expected[0] != expected[1]
    drafter = load_feature_drafter(drafter_path, paths[0])
    targets = [TransformersTarget.load(path, feature_projection=drafter_path) for path in paths]
    async with pool([drafter], targets) as (_, clients):
        tasks = [[generated(client, sampling) for sampling in SAMPLINGS] for client in clients]
        generations = await asyncio.gather(*(asyncio.gather(*each) for each in tasks))
    for each, tokens in zip(generations, expected, strict=True):
        assert [generation.token_ids for generation in each] == tokens
        assert all(generation.statistics.lone_roots <= 1 for generation in each)
    assert drafter.num_sessions == 0


async def test_drafter_that_is_lost_is_lost_to_no_target() -> None:
    """Of two drafters one ends while both targets have streams with it: the other goes on for both, tokens are exact."""
    targets = [SimulatedTarget(SimulatedModel(seed=seed), step_seconds=0.01) for seed in (0, 1)]
    expected = [await undisturbed(SimulatedTarget(SimulatedModel(seed=seed))) for seed in (0, 1)]
    drafters = [SimulatedDrafter(MODEL) for _ in range(2)]
    async with pool(drafters, targets) as (draft, clients):
        tasks = [[asyncio.create_task(generated(client, sampling)) for sampling in SAMPLINGS] for client in clients]
        async with asyncio.timeout(20):
            while sum(drafter.num_sessions for drafter in drafters) < len(targets) * len(SAMPLINGS):
                await asyncio.sleep(0.005)
        assert drafters[0].num_sessions, "the first drafter has sessions to lose"
        await draft[0].stop()
        generations = [[await task for task in each] for each in tasks]
    for each, tokens in zip(generations, expected, strict=True):
        assert [generation.token_ids for generation in each] == tokens
    lone_roots = sum(generation.statistics.lone_roots for each in generations for generation in each)
    assert lone_roots < len(targets) * len(SAMPLINGS) * 10, "the streams of the lost drafter went on without one"
    assert drafters[1].num_sessions == 0


@pytest.mark.parametrize("stranger", ["vocabulary", "features"])
async def test_target_that_does_not_fit_leaves_the_pool_to_the_others(stranger: str, tmp_path: Path) -> None:
    """The handshake tells fitting targets from others: the one decodes with drafts, the other without, both exactly."""
    path = save_tiny_model(tmp_path / "target", "llama", eos_token_id=None)
    drafter_path = save_recurrent(tmp_path / "drafter")
    drafter = load_feature_drafter(drafter_path, path)
    fitting: TargetEngine = TransformersTarget.load(path, feature_projection=drafter_path)
    other: TargetEngine = SimulatedTarget(MODEL) if stranger == "vocabulary" else TransformersTarget.load(path)
    expected = [await undisturbed(TransformersTarget.load(path)), await undisturbed(other)]
    async with pool([drafter], [fitting, other]) as (_, clients):
        generations = [await asyncio.gather(*(generated(client, sampling) for sampling in SAMPLINGS)) for client in clients]
    for each, tokens in zip(generations, expected, strict=True):
        assert [generation.token_ids for generation in each] == tokens
    drafted, undrafted = generations
    assert all(generation.statistics.lone_roots <= 1 for generation in drafted)
    assert all(generation.statistics.draft_tokens == 0 for generation in undrafted)
