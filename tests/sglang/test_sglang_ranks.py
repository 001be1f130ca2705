"""Two ranks over gloo, each with half the heads, are one target; they hold choices to masks, and hand out hidden states."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.target_contract import GREEDY, SAMPLED, prefill, random_tree, score
from tests.engines.tiny_drafters import save_dflash
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from tests.sglang.served import Served, served
from treewire.core.acceptance import accept
from treewire.core.sampling import Sampling
from verify_service.engine import Posterior, PrefillChunk, Scoring, TargetEngine
from verify_service.engines.features import FeatureTaps
from verify_service.engines.sglang import SglangTarget
from verify_service.engines.transformers import TransformersTarget

TAP_LAYERS = (0, 1)
SEEDED = Sampling(temperature=0.9, seed=6)
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
    """A prompt in chunks and a random tree, greedy and sampled: the same tokens and, to rounding, the same log-probs."""
    answers = [_posteriors(each.engine()) for each in (two_ranks, one_rank)]
    for two, one in zip(*answers, strict=True):
        assert two.token_ids == one.token_ids
        for likely_two, likely_one in zip(two.node_probabilities, one.node_probabilities, strict=True):
            assert likely_two.token_ids[0] == likely_one.token_ids[0]
            torch.testing.assert_close(torch.tensor(likely_two.log_probs), torch.tensor(likely_one.log_probs), **_TOLERANCE)


def _posteriors(engine: SglangTarget) -> list[Posterior]:
    rng, answers = random.Random(41), []
    for session, sampling in ((1, GREEDY), (2, SAMPLED)):
        answers.append(prefill(engine, session, [9, 8, 7, 6], sampling, chunk_size=3, num_node_probabilities=5))
        root = answers[-1].token_ids[-1]
        answers.append(score(engine, session, random_tree(rng, root, VOCABULARY_SIZE, 14)))
    return answers


class LateMasks:
    """Masks that are found some time after the step has begun."""

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
        self._rows = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
        self._found = threading.Event()
        threading.Timer(0.2, self._found.set).start()

    def rows(self) -> NDArray[np.int32]:
        """Waits."""
        assert self._found.wait(60)
        return self._rows


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_masks_hold_in_steps_shared_with_free_sessions(ranks: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """Late masks reach the part that they belong to, the next step is in order: choices are the transformers engine's."""
    engine: SglangTarget = request.getfixturevalue(ranks).engine()
    assert _masked_rounds(engine) == _masked_rounds(TransformersTarget.load(folder))


def _masked_rounds(engine: TargetEngine) -> list[tuple[int, ...]]:
    """Choices of a free session, and of a greedy and a drawing one that are masked: behind prompts, trees, and trees without
    masks; checks that the masked ones are allowed."""
    rng, prompts = np.random.default_rng(3), {21: (9, 8, 7), 22: (5, 6, 7, 8), 23: (4, 4, 9)}
    for session, sampling in ((21, SEEDED), (22, SEEDED), (23, GREEDY)):
        engine.open(session, prompts[session], sampling)
    allowed = {session: rng.random((1, VOCABULARY_SIZE)) < 0.2 for session in (22, 23)}
    masks = {session: LateMasks(rows) for session, rows in allowed.items()}
    chunks = [PrefillChunk(session, prompt, last=True, masks=masks.get(session)) for session, prompt in prompts.items()]
    chosen = [posterior.token_ids for posterior in engine.step(chunks)]
    assert all(allowed[session][0, token_ids[0]] for session, token_ids in zip(prompts, chosen, strict=True) if session > 21)

    trees = [random_tree(random.Random(n), ids[0], VOCABULARY_SIZE, 6 + n) for n, ids in enumerate(chosen)]
    allowed = {session: rng.random((len(trees[session - 21]), VOCABULARY_SIZE)) < 0.2 for session in (22, 23)}
    masks = {session: LateMasks(rows) for session, rows in allowed.items()}
    scorings = [Scoring(session, tree, masks=masks.get(session)) for session, tree in zip(prompts, trees, strict=True)]
    scored = [posterior.token_ids for posterior in engine.step(scorings)]
    for session, rows in allowed.items():
        assert all(row[token_id] for row, token_id in zip(rows, scored[session - 21], strict=True))

    kept = [accept(tree, token_ids) for tree, token_ids in zip(trees, scored, strict=True)]
    for session, acceptance in zip(prompts, kept, strict=True):
        engine.keep(session, acceptance)
    followers = [random_tree(random.Random(9), each.next_token_id, VOCABULARY_SIZE, 5) for each in kept]
    free = [Scoring(session, tree) for session, tree in zip(prompts, followers, strict=True)]
    after = [posterior.token_ids for posterior in engine.step(free)]
    for session in prompts:
        engine.release(session)
    return [*chosen, *scored, *after]


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
