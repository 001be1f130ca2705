"""Two ranks over gloo, each with half the heads, are one target; and they hand out hidden states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.target_contract import GREEDY, SAMPLED, prefill, random_tree, score
from tests.engines.tiny_drafters import save_dflash
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from tests.sglang.served import Served, served
from treewire.core.acceptance import accept
from verify_service.engine import Posterior, PrefillChunk
from verify_service.engines.features import FeatureTaps
from verify_service.engines.sglang import SglangTarget

TAP_LAYERS = (0, 1)
_TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of four heads in two groups, and one layer more than is tapped."""
    shape = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    return save_tiny_model(tmp_path_factory.mktemp("two-ranks"), "llama", **shape)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[Served]:
    """SGLang with that model on two ranks."""
    with served(folder, tp_size=2, tap_layers=TAP_LAYERS) as started:
        yield started


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[Served]:
    """The same on one."""
    with served(folder, tap_layers=TAP_LAYERS) as started:
        yield started


def test_two_ranks_are_one(two_ranks: Served, one_rank: Served) -> None:
    """Rounds of random trees, greedy and sampled, end in the same tokens and, to rounding, the same log-probs."""
    answers = [_rounds(each.engine()) for each in (two_ranks, one_rank)]
    for two, one in zip(*answers, strict=True):
        assert two.token_ids == one.token_ids
        for likely_two, likely_one in zip(two.node_probabilities, one.node_probabilities, strict=True):
            assert likely_two.token_ids[0] == likely_one.token_ids[0]
            torch.testing.assert_close(torch.tensor(likely_two.log_probs), torch.tensor(likely_one.log_probs), **_TOLERANCE)


def _rounds(engine: SglangTarget) -> list[Posterior]:
    rng, answers = random.Random(41), []
    for session, sampling in ((1, GREEDY), (2, SAMPLED)):
        posterior = prefill(engine, session, [9, 8, 7, 6], sampling, chunk_size=3, num_node_probabilities=5)
        root = posterior.token_ids[-1]
        for size in (6, 14):
            tree = random_tree(rng, root, VOCABULARY_SIZE, size, [posterior.token_ids[-1]])
            posterior = score(engine, session, tree)
            acceptance = accept(tree, posterior.token_ids)
            engine.keep(session, acceptance)
            root = acceptance.next_token_id
            answers.append(posterior)
    return answers


def test_features_are_hidden_states(two_ranks: Served, model: PreTrainedModel) -> None:
    """Features of chunks and of every node are transformers' hidden states after the tapped layers, along the path."""
    engine, prompt = two_ranks.engine(), [9, 8, 7, 6]
    engine.open(1, prompt, GREEDY, wants_features=True)
    chunk = engine.step([PrefillChunk(1, (9, 8, 7), last=False)])[0]
    last = engine.step([PrefillChunk(1, (6,), last=True)])[0]
    assert chunk.features is not None
    assert last.features is not None
    _assert_features(model, prompt, np.concatenate([chunk.features, last.features]))
    tree = random_tree(random.Random(42), last.token_ids[-1], VOCABULARY_SIZE, 11)
    scored = score(engine, 1, tree)
    assert scored.features is not None
    for node in range(len(tree)):
        path = tree.path(node)
        text = [*prompt, *(tree.token_ids[step] for step in path)]
        _assert_features(model, text, scored.features[list(path)])


@torch.inference_mode()
def _assert_features(model: PreTrainedModel, token_ids: list[int], features: np.ndarray) -> None:
    """`features` are those of the last of the tokens."""
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in TAP_LAYERS], dim=-1)[-len(features) :]
    torch.testing.assert_close(torch.from_numpy(features), expected, **_TOLERANCE)


def test_features_are_fused_as_transformers_target_fuses_them(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    """With a drafter's projection, features are those that the same projection makes of transformers' hidden states."""
    checkpoint = save_dflash(tmp_path / "drafter")
    shape = {"num_layers": model.config.num_hidden_layers, "hidden_size": model.config.hidden_size}
    taps = FeatureTaps.load(checkpoint, device=torch.device("cpu"), **shape)
    with served(folder, feature_projection=checkpoint) as started:
        engine, prompt = started.engine(), [9, 8, 7, 6, 5]
        assert engine.target.feature_projection_hash == taps.projection.hash
        engine.open(1, prompt, GREEDY, wants_features=True)
        features = engine.step([PrefillChunk(1, tuple(prompt), last=True)])[0].features
    assert features is not None
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = taps.of_hidden_states(states, torch.arange(len(prompt)))
    torch.testing.assert_close(torch.from_numpy(features), expected, **_TOLERANCE)
