"""The output is the target's own, whatever the drafter, the tree, the batch, and whatever happens to the drafter."""

from __future__ import annotations

import asyncio

import pytest

from draft_service.engine import DraftEngine
from draft_service.engines.ngram import NgramDrafter
from draft_service.engines.simulated import SimulatedDrafter
from tests.system.local_stack import MODEL, LocalStack, local_stack
from treewire import Sampling
from treewire.types import Generation

PROMPTS = ["tell me about trees", "1 2 3 1 2 3 1 2", "日本語 and 🌳", "a", "once upon a time there was a model"]
SAMPLINGS = [None, Sampling(temperature=1.0, seed=7), Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=8)]


async def generate(
    stack: LocalStack, prompt: str, sampling: Sampling | None, budget: int, width: int | None = None
) -> Generation:
    async with stack.client() as client:
        return await client.generate(prompt, sampling=sampling, budget=budget, width=width, max_tokens=64)


_plain: list[Generation] = []


async def plain() -> list[Generation]:
    """Every prompt under every sampling, decoded token by token without a drafter, one after the other. Made once."""
    if not _plain:
        async with local_stack(with_drafter=False) as stack:
            _plain.extend([await generate(stack, prompt, sampling, 0) for sampling in SAMPLINGS for prompt in PROMPTS])
    return _plain


@pytest.mark.parametrize(
    "drafter",
    [SimulatedDrafter(MODEL), SimulatedDrafter(MODEL, agreement=0.2), NgramDrafter()],
    ids=["good drafter", "bad drafter", "n-gram"],
)
@pytest.mark.parametrize("budget", [0, 1, 8, 64])
async def test_10_12_30_same_tokens_for_every_drafter_budget_and_batch(drafter: DraftEngine, budget: int) -> None:
    """Greedy and seeded: all prompts at once in one batch give what each gives alone and undrafted."""
    expected = await plain()
    async with local_stack(drafter=drafter) as stack:
        tasks = [generate(stack, prompt, sampling, budget) for sampling in SAMPLINGS for prompt in PROMPTS]
        generations = await asyncio.gather(*tasks)
    assert [generation.token_ids for generation in generations] == [generation.token_ids for generation in expected]
    assert [generation.text for generation in generations] == [generation.text for generation in expected]


async def test_chain_gives_the_same_tokens() -> None:
    """A chain is a tree of width one."""
    expected = await plain()
    async with local_stack() as stack:
        generations = [await generate(stack, prompt, sampling, 7, width=1) for sampling in SAMPLINGS for prompt in PROMPTS]
    assert [generation.token_ids for generation in generations] == [generation.token_ids for generation in expected]
    assert max(generation.statistics.mean_acceptance_length for generation in generations) > 1.5


async def test_drafts_are_used() -> None:
    """With a drafter that mostly agrees, most rounds give more than one token: the tests above test trees, not lone roots."""
    async with local_stack() as stack:
        greedy = await generate(stack, PROMPTS[0], None, 16)
        sampled = await generate(stack, PROMPTS[0], SAMPLINGS[1], 16)
    assert greedy.statistics.mean_acceptance_length > 2
    assert sampled.statistics.mean_acceptance_length > 2


async def test_different_seeds_give_different_tokens_and_the_seed_in_use_is_told() -> None:
    """A request without a seed gets one, and asking for that seed again gives the same tokens."""
    async with local_stack() as stack, stack.client() as client:
        first = await client.generate("a", sampling=Sampling(temperature=1.0), max_tokens=48)
        second = await client.generate("a", sampling=Sampling(temperature=1.0), max_tokens=48)
        again = await client.generate("a", sampling=Sampling(temperature=1.0, seed=first.seed), max_tokens=48)
    assert first.token_ids != second.token_ids
    assert first.token_ids == again.token_ids
