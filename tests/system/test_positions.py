"""The prompt is encoded once on each side; every later round computes only what is new."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draft_service.engines.causal_lm import CausalLMDrafter
from draft_service.engines.checkpoints import load_feature_drafter
from tests.engines.tiny_drafters import save_recurrent
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import MODEL, local_stack
from treewire import Sampling
from treewire.types import Options
from verify_service.engines.simulated import SimulatedTarget
from verify_service.engines.transformers import TransformersTarget


async def test_target_computes_the_prompt_and_the_nodes() -> None:
    """Positions computed in a whole generation: the prompt's, then for each round the root and the drafted nodes."""
    target = SimulatedTarget(MODEL)
    async with local_stack(target) as stack, stack.client() as client:
        before = target.positions_computed
        generation = await client.generate("tell me about trees", max_tokens=100, ignore_end=True, budget=12)
    statistics = generation.statistics
    assert statistics.draft_tokens > 100
    assert target.positions_computed - before == generation.prompt_tokens + statistics.draft_tokens + statistics.rounds


async def test_drafter_computes_the_prompt_and_the_committed_tokens(tmp_path: Path) -> None:
    """A drafter with a model computes the prompt once, then committed tokens and the path that it drafts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MODEL.vocabulary_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    horizon = 4
    drafter = CausalLMDrafter.load(str(tmp_path), horizon=horizon, width=8)
    async with local_stack(drafter=drafter) as stack, stack.client() as client:
        generation = await client.generate("tell me about trees", max_tokens=60, ignore_end=True, budget=12)
    rounds = generation.statistics.rounds
    committed = len(generation.token_ids) - 1  # the last commit ends the generation and is not drafted from
    most = generation.prompt_tokens + committed + (horizon - 1) * rounds
    assert generation.prompt_tokens + rounds <= drafter.positions_computed <= most


@pytest.mark.parametrize("page_size", [1, 16])
async def test_generations_of_one_request_share_its_prefill(page_size: int) -> None:
    """The first computes the prompt; each of the others its last token, and what does not fill a page."""
    target = SimulatedTarget(MODEL, kv_page_size=page_size)
    prompt = tuple(range(300, 357))
    async with local_stack(target) as stack, stack.client() as client:
        before = target.positions_computed
        generations = await client.generate_all(token_ids=prompt, n=4, max_tokens=20, ignore_end=True, budget=12)
    num_own = len(prompt) - (len(prompt) - 1) // page_size * page_size
    nodes = sum(each.statistics.draft_tokens + each.statistics.rounds for each in generations)
    assert target.positions_computed - before == len(prompt) + 3 * num_own + nodes


async def test_generations_share_a_prefill_whose_features_a_drafter_reads(tmp_path: Path) -> None:
    """The prompt's context features are made once, and each generation's own drafter session gets them."""
    path, drafter_path = save_tiny_model(tmp_path / "target", "llama", eos_token_id=None), save_recurrent(tmp_path / "drafter")
    target = TransformersTarget.load(path, feature_projection=drafter_path)
    prompt = tuple(range(5, 60))
    options: Options = {
        "token_ids": prompt,
        "max_tokens": 12,
        "ignore_end": True,
        "sampling": Sampling(temperature=1.0, seed=3),
    }
    async with local_stack(target, load_feature_drafter(drafter_path, path)) as stack, stack.client() as client:
        alone = [await client.generate(**{**options, "sampling": Sampling(temperature=1.0, seed=3 + i)}) for i in range(3)]  # type: ignore[typeddict-item]
        other = tuple(reversed(prompt))
        before = target.positions_computed
        generations = await client.generate_all(**{**options, "token_ids": other}, n=3)  # type: ignore[typeddict-item]
        nodes = sum(each.statistics.draft_tokens + each.statistics.rounds for each in generations)
        assert target.positions_computed - before == len(prompt) + 2 + nodes
        again = await client.generate_all(**options, n=3)
    assert [each.token_ids for each in again] == [each.token_ids for each in alone]
    assert all(each.statistics.draft_tokens for each in (*generations, *again))
