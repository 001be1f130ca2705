"""What SGLang is here for: latent attention (MLA) and a mixture of experts, as in DeepSeek V3 and Kimi K2."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.target_contract import GREEDY, prefill, random_tree
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from tests.sglang.served import Served, served
from treewire.core.acceptance import accept
from verify_service.engine import Scoring
from verify_service.engines.sglang.traits import ModelTraits

SHAPE: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of DeepSeek V3's architecture."""
    return save_tiny_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3", **SHAPE)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """SGLang with that model."""
    with served(folder, tp_size=request.param) as ranks:
        yield ranks


@torch.inference_mode()
def own_log_probs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The model's own log-probs after the last of these tokens."""
    log_probs: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, -1].log_softmax(-1)
    return log_probs


def test_the_model_is_of_that_kind(folder: Path) -> None:
    """What decides about attention backends is read from its config."""
    assert ModelTraits.read(folder).is_mla


def test_trees_through_latent_attention_and_experts_are_exact(started: Served, model: PreTrainedModel) -> None:
    """Two rounds of two sessions: log-probs of every node are the model's own after the node's path."""
    rng, engine = random.Random(51), started.engine()
    texts: dict[int, list[int]] = {}
    for session, length in ((1, 5), (2, 12)):
        prompt = [rng.randrange(VOCABULARY_SIZE) for _ in range(length)]
        root = prefill(engine, session, prompt, GREEDY, chunk_size=7, num_node_probabilities=VOCABULARY_SIZE).token_ids[-1]
        assert root == int(own_log_probs(model, prompt).argmax())
        texts[session] = [*prompt, root]
    for _ in range(2):
        trees = {
            session: random_tree(rng, text[-1], VOCABULARY_SIZE, 9, [int(own_log_probs(model, text).argmax())])
            for session, text in texts.items()
        }
        posteriors = engine.step([Scoring(session, tree) for session, tree in trees.items()])
        for (session, tree), posterior in zip(trees.items(), posteriors, strict=True):
            for node, likely in enumerate(posterior.node_probabilities):
                path = [*texts[session][:-1], *(tree.token_ids[step] for step in tree.path(node))]
                expected = own_log_probs(model, path)[list(likely.token_ids)]
                torch.testing.assert_close(torch.tensor(likely.log_probs), expected, atol=2e-4, rtol=1e-4)
            acceptance = accept(tree, posterior.token_ids)
            assert len(acceptance.nodes) > 1
            engine.keep(session, acceptance)
            texts[session] += acceptance.token_ids(tree)
