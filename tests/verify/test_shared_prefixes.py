"""A prompt that begins like what the target has committed is computed only from there, and nobody notices but by the time."""

from __future__ import annotations

import pytest

from tests.system.local_stack import MODEL, local_stack
from treewire import Sampling
from treewire.types import Generation
from verify_service.engines.simulated import SimulatedTarget

PROMPT = "tell me about trees and roots and leaves and all that grows on them, one after the other; " * 3
NUM_TOKENS = 12


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=7)], ids=["greedy", "seeded"])
async def test_the_same_prompt_again_is_not_computed_again(page_size: int, sampling: Sampling | None) -> None:
    """The second generation gives the same tokens and computes at most a page of the prompt, in chunks or not."""
    target = SimulatedTarget(MODEL, kv_page_size=page_size)
    async with local_stack(target, with_drafter=False, verify={"prefill_chunk_tokens": 7}) as stack:

        async def generate() -> Generation:
            async with stack.client() as client:
                return await client.generate(PROMPT, sampling=sampling, budget=0, max_tokens=NUM_TOKENS)

        first = await generate()
        num_computed = target.positions_computed
        second = await generate()
    assert second.token_ids == first.token_ids
    assert num_computed > 4 * (NUM_TOKENS + page_size)  # otherwise the prompt is too short to tell
    assert target.positions_computed - num_computed <= page_size + NUM_TOKENS
