"""The drafter that is shipped for the default target, on that target: the same tokens in fewer rounds."""

from __future__ import annotations

import pytest

from draft_service.engines.checkpoints import load_feature_drafter
from gateway.tokenization import Tokenization
from tests.system.local_stack import local_stack
from treewire import Sampling
from treewire.weights import DEFAULT_MODEL, resolve, resolve_drafter
from verify_service.engines.transformers import TransformersTarget

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

PROMPTS = ("Explain why the sky is blue.", "Give me three ideas for dinner.")
SAMPLINGS = (None, Sampling(temperature=1.0, seed=1234))
MAX_TOKENS = 24
BUDGET = 16


async def test_shipped_drafter_changes_the_rounds_and_no_token() -> None:
    """Greedy and seeded, the output is that of plain decoding; greedy, it comes in far fewer rounds."""
    path, drafter_path = resolve(DEFAULT_MODEL, quiet=True), resolve_drafter(DEFAULT_MODEL)
    target = TransformersTarget.load(path, feature_projection=drafter_path, kv_tokens=4096, max_tree_nodes=64)
    drafter = load_feature_drafter(drafter_path, path, dtype="auto")
    stack_of_both = local_stack(
        target,
        drafter,
        tokenization=Tokenization.from_directory(path),
        draft_timeout_seconds=120.0,
        verify_timeout_seconds=300.0,
    )
    num_greedy_rounds = 0
    async with stack_of_both as stack, stack.client() as client:
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                plain = await client.generate(prompt, sampling=sampling, budget=0, max_tokens=MAX_TOKENS)
                drafted = await client.generate(prompt, sampling=sampling, budget=BUDGET, max_tokens=MAX_TOKENS)
                assert drafted.token_ids == plain.token_ids
                num_greedy_rounds += drafted.statistics.rounds if sampling is None else 0
    assert num_greedy_rounds < 0.8 * len(PROMPTS) * (MAX_TOKENS - 1)
