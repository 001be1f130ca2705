"""The step on static buffers is the step on ragged rows: the same tokens, whatever fills a bucket."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.target_contract import GREEDY, Subject, TargetContract, prefill, random_tree, score
from tests.engines.test_tensor_parallel import check_same, masked_choices, rounds
from tests.engines.tiny_drafters import save_dflash
from tests.engines.tiny_models import save_tiny_model
from treewire.core.noise import hashed_seed, noise_integers, noise_integers_of
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.core.visibility import visibility as core_visibility
from treewire.kv.store import LayerKv
from verify_service.engine import Scoring, Unsupported
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.static_step import visibility

SIZES: dict[str, Any] = {"max_tree_nodes": 24, "max_context": 96, "kv_tokens": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def static(folder: Path, **options: Any) -> TransformersTarget:
    """An engine on static buffers, run eagerly."""
    return TransformersTarget.load(folder, graphs="on", **{**SIZES, **options})


class TestStaticStep(TargetContract):
    """The contract, on static buffers."""

    @pytest.fixture
    def subject(self, folder: Path, model: PreTrainedModel) -> Subject:
        """The engine, with transformers itself as the oracle."""

        @torch.inference_mode()
        def next_token_id(token_ids: Any) -> int:
            return int(model(torch.tensor([list(token_ids)])).logits[0, -1].argmax())

        return Subject(make=lambda: static(folder), next_token_id=next_token_id)


@pytest.mark.parametrize("page_size", [1, 8])
def test_it_is_the_ragged_step(folder: Path, tmp_path: Path, page_size: int) -> None:
    """Batched rounds, greedy, seeded, truncated, penalised and with features, give what ragged rows give."""
    options = {"feature_projection": save_dflash(tmp_path), "kv_page_size": page_size}
    expected = rounds(TransformersTarget.load(folder, graphs="off", **SIZES, **options))
    check_same(rounds(static(folder, **options)), expected)


def test_masks_hold_on_static_buffers(folder: Path) -> None:
    """Where a structure allows some tokens alone, the choices are those on ragged rows."""
    assert masked_choices(static(folder)) == masked_choices(TransformersTarget.load(folder, graphs="off", **SIZES))


def test_what_memory_held_before_is_in_no_answer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV memory that is full of NaN at the start changes nothing: what fills a bucket is multiplied by zero, and finite."""
    options = {"feature_projection": save_dflash(tmp_path)}
    expected = rounds(TransformersTarget.load(folder, graphs="off", **SIZES, **options))

    def full_of_nan(num_slots: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKv:
        return LayerKv(*(rows.new_full((num_slots, *rows.shape[1:]), torch.nan) for rows in (keys, values)))

    monkeypatch.setattr("treewire.kv.store._make_layer", full_of_nan)
    check_same(rounds(static(folder, **options)), expected)


def test_every_bucket_holds_what_fits_it(folder: Path) -> None:
    """Trees of every size up to the largest bucket, alone and in batches of any size, as on ragged rows."""
    rng = random.Random(3)
    engines = [TransformersTarget.load(folder, graphs=graphs, max_tree_nodes=513, kv_tokens=8192) for graphs in ("on", "off")]
    prompts = [[rng.randrange(97) for _ in range(5 + 3 * number)] for number in range(8)]
    for num_nodes, batch_size in ((1, 8), (2, 3), (8, 1), (9, 5), (33, 2), (100, 1), (257, 1), (513, 1)):
        trees = [random_tree(rng, rng.randrange(97), 97, max(1, num_nodes - number)) for number in range(batch_size)]
        answers = []
        for engine in engines:
            for session in range(batch_size):
                sampling = Sampling(temperature=1.0, seed=2**63 + session) if session % 2 else GREEDY
                prefill(engine, session, prompts[session], sampling)
            answers.append(engine.step([Scoring(session, tree) for session, tree in enumerate(trees)]))
            for session in range(batch_size):
                engine.release(session)
        assert [answer.token_ids for answer in answers[0]] == [answer.token_ids for answer in answers[1]]


def test_steps_outside_the_buckets_are_counted(folder: Path) -> None:
    """Chunks, and trees too deep to draw at every depth, run as ragged rows; a tree in its bucket counts nothing."""
    engine = static(folder, max_tree_nodes=60, max_context=128)
    root = prefill(engine, 1, [1, 2, 3], Sampling(temperature=1.0)).token_ids[0]
    assert engine.num_missed_graphs == 1
    score(engine, 1, DraftTree((root, 5), (-1, 0)))
    assert engine.num_missed_graphs == 1
    prefill(engine, 2, [1, 2, 4], Sampling(temperature=1.0))
    score(engine, 2, DraftTree((root, *range(40)), (-1, *range(40))))
    assert engine.num_missed_graphs == 3


def test_what_cannot_be_captured_is_refused(folder: Path) -> None:
    """Graphs for int8, or for transformers' own modules, are refused by name."""
    with pytest.raises(Unsupported, match="this is int8"):
        static(folder, dtype="int8")
    with pytest.raises(Unsupported, match="the forward of transformers"):
        static(folder, forward="transformers")


def test_masks_are_compiled_from_parents() -> None:
    """Visibility made on the device is that of the core, for random trees of many sizes and for chains."""
    rng = random.Random(5)
    trees = [random_tree(rng, 0, 97, size) for size in (1, 2, 7, 8, 9, 33, 64, 129)]
    trees.append(DraftTree(tuple(range(70)), (-1, *range(69))))
    for tree in trees:
        parents = torch.tensor([[0, *tree.parents[1:]]])
        np.testing.assert_array_equal(visibility(parents)[0].numpy(), core_visibility(tree.parents))


def test_noise_of_many_seeds_is_that_of_each() -> None:
    """Hashed seeds in a tensor give the integers of each seed alone."""
    seeds, positions, token_ids = [0, 7, 2**64 - 1], torch.tensor([3, 99]), torch.arange(50)
    together = noise_integers_of(
        torch.tensor([hashed_seed(seed) for seed in seeds])[:, None, None], positions[:, None], token_ids
    )
    for number, seed in enumerate(seeds):
        for row, position in enumerate(positions.tolist()):
            assert torch.equal(together[number, row], noise_integers(seed, position, token_ids))
