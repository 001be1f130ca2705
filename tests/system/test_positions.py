"""The prompt is encoded once on each side; every later round computes only what is new."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draft_service.engines.causal_lm import CausalLMDrafter
from tests.system.local_stack import MODEL, local_stack
from verify_service.engines.simulated import SimulatedTarget


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
