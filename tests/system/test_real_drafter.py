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
MAX_TOKENS = 12
BUDGET = 16
CHAIN = 6


@pytest.mark.parametrize(("beam", "budgets"), [(1, (BUDGET,)), (4, (1, 8, BUDGET, 64))])
async def test_shipped_drafter_changes_the_rounds_and_no_token(beam: int, budgets: tuple[int, ...]) -> None:
    """Greedy and seeded, as a chain and with every budget, the output is that of plain decoding; greedy, it comes in far fewer
    rounds. The same with children by depth alone, and with those of the likeliest prefixes in conditional rows."""
    path, drafter_path = resolve(DEFAULT_MODEL, quiet=True), resolve_drafter(DEFAULT_MODEL)
    target = TransformersTarget.load(path, feature_projection=drafter_path, kv_tokens=4096, max_tree_nodes=65)
    drafter = load_feature_drafter(drafter_path, path, dtype="auto", beam=beam)
    stack_of_both = local_stack(
        target,
        drafter,
        tokenization=Tokenization.from_directory(path),
        draft_timeout_seconds=120.0,
        verify_timeout_seconds=300.0,
    )
    num_greedy_rounds = 0
    async with stack_of_both as stack, stack.client() as client:
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
            plain = await client.generate(prompt, sampling=sampling, budget=0, max_tokens=MAX_TOKENS)
            chain = await client.generate(prompt, sampling=sampling, budget=CHAIN, width=1, max_tokens=MAX_TOKENS)
            drafted = {
                budget: await client.generate(prompt, sampling=sampling, budget=budget, max_tokens=MAX_TOKENS)
                for budget in budgets
            }
            assert plain.statistics.draft_tokens == 0
            assert {each.token_ids for each in (chain, *drafted.values())} == {plain.token_ids}
            assert all(each.statistics.lone_roots <= 1 for each in (chain, *drafted.values()))
            num_greedy_rounds += drafted[BUDGET].statistics.rounds if sampling is None else 0
    assert num_greedy_rounds < 0.8 * (MAX_TOKENS - 1)
