"""Two ranks, and the three of the real small model, are one target: the same contract, the same tokens."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.ranks import SIZES, Served, served
from tests.engines.target_contract import (
    GREEDY,
    MAX_TREE_NODES,
    PENALISED,
    SAMPLED,
    Subject,
    TargetContract,
    prefill,
    random_tree,
    score,
)
from tests.engines.tiny_drafters import save_dflash
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.core.acceptance import accept
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.weights import resolve
from verify_service.engine import EngineLost, Posterior, PrefillChunk, Scoring, TargetEngine, Unsupported
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.tensor_parallel import FoundMasks, StartedTransformers, TensorParallelOptions

SHAPE: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 100}
SEEDED = Sampling(temperature=1.3, seed=5)
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 8 KV heads, whose MLP and vocabulary do not divide evenly, with biases everywhere."""
    path = save_tiny_model(tmp_path_factory.mktemp("eight-heads"), "llama", **SHAPE, attention_bias=True, mlp_bias=True)
    generator = torch.Generator().manual_seed(6)
    weights = load_file(path / "model.safetensors")
    biases = {name: 0.3 * torch.randn(bias.shape, generator=generator) for name, bias in weights.items() if "bias" in name}
    save_file({**weights, **biases}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def projection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that features are made for."""
    return save_dflash(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def two_ranks(folder: Path, projection: Path) -> Iterator[Served]:
    """The model on two ranks."""
    with served(folder, 2, feature_projection=projection) as started:
        yield started


def one_rank(folder: Path, projection: Path | None = None, **options: Any) -> TransformersTarget:
    """The engine without ranks."""
    return TransformersTarget.load(folder, feature_projection=projection, **{**SIZES, "num_threads": None, **options})


class TestTwoRanks(TargetContract):
    """The contract, on two ranks."""

    @pytest.fixture
    def subject(self, two_ranks: Served, model: PreTrainedModel) -> Subject:
        """The engine over two ranks, with transformers itself as the oracle."""

        @torch.inference_mode()
        def next_token_id(token_ids: Any) -> int:
            return int(model(torch.tensor([list(token_ids)])).logits[0, -1].argmax())

        return Subject(make=two_ranks.engine, next_token_id=next_token_id)


def rounds(engine: TargetEngine, num_rounds: int = 2, num_nodes: int = 13) -> list[Posterior]:
    """Batched rounds of sessions of every kind, a chunk beside the trees: greedy, seeded, truncated, penalised, with features.

    Prompts begin alike, so that pages are shared; the answers in order.
    """
    rng, answers = random.Random(41), []
    vocabulary_size = engine.target.vocabulary_size
    prompt = [rng.randrange(vocabulary_size) for _ in range(19)]
    samplings = {1: GREEDY, 2: SEEDED, 3: SAMPLED, 4: PENALISED, 5: SEEDED}
    roots = {}
    for session, sampling in samplings.items():
        asked = {"num_node_probabilities": 5} if session in (1, 4) else {}
        if session == 5:
            engine.open(5, prompt, sampling, wants_features=True)
            posteriors = [engine.step([PrefillChunk(5, tuple(prompt[:7]), last=False)])[0]]
            posteriors.append(engine.step([PrefillChunk(5, tuple(prompt[7:]), last=True)])[0])
        else:
            posteriors = [prefill(engine, session, [*prompt, session], sampling, chunk_size=8, **asked)]
        answers.extend(posteriors)
        roots[session] = posteriors[-1].token_ids[-1]
    for number in range(num_rounds):
        trees = {session: random_tree(rng, root, vocabulary_size, num_nodes - session) for session, root in roots.items()}
        late = 10 + number
        known = engine.open(late, [*prompt[:11], number], GREEDY)
        chunk = PrefillChunk(late, tuple([*prompt[:11], number][known:]), last=True)
        scored = engine.step([*(Scoring(session, tree) for session, tree in trees.items()), chunk])
        for (session, tree), posterior in zip(trees.items(), scored, strict=False):
            distributions = posterior.distributions
            assert distributions is not None
            acceptance = accept(tree, posterior.token_ids)
            entries = distributions.log_probs(acceptance.nodes, acceptance.token_ids(tree), 3)
            assert [entry.top_token_ids for entry in entries]
            answers.append(Posterior(tuple(token for entry in entries for token in entry.top_token_ids)))
            engine.keep(session, acceptance)
            roots[session] = acceptance.next_token_id
        answers.extend(scored)
    for session in (*samplings, 10, 11):
        engine.release(session)
    return answers


def masked_choices(engine: TargetEngine) -> list[tuple[int, ...]]:
    """What a greedy and a drawing session choose after a prompt and at the nodes of a tree where a third of the tokens is
    allowed; checks that the choices are allowed."""
    rng = np.random.default_rng(11)
    size = engine.target.vocabulary_size
    chosen = []
    for number, sampling in enumerate((GREEDY, Sampling(temperature=0.9, seed=6)), start=1):
        prompt = (3, 4, 5, 6, 7, 8, 10 + number)
        known = engine.open(number, prompt, sampling)
        first = _masks(rng, 1, size)
        (posterior,) = engine.step([PrefillChunk(number, prompt[known:], last=True, masks=first)])
        tree = random_tree(random.Random(5), posterior.token_ids[0], size, 9)
        each = _masks(rng, len(tree), size)
        (scored,) = engine.step([Scoring(number, tree, masks=each)])
        for token_ids, masks in ((posterior.token_ids, first), (scored.token_ids, each)):
            assert all(_allows(row, token_id) for row, token_id in zip(masks.rows(), token_ids, strict=True))
        chosen += [posterior.token_ids, scored.token_ids]
        engine.release(number)
    return chosen


def _masks(rng: np.random.Generator, num_rows: int, vocabulary_size: int) -> FoundMasks:
    allowed = rng.random((num_rows, -(-vocabulary_size // 32) * 32)) < 1 / 3
    return FoundMasks(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


def _allows(row: NDArray[np.int32], token_id: int) -> bool:
    return bool(row[token_id // 32] >> (token_id % 32) & 1)


def check_same(found: list[Posterior], expected: list[Posterior]) -> None:
    """The same tokens; log-probs and features to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for own, reference in zip(one.node_probabilities, other.node_probabilities, strict=True):
            assert own.token_ids[0] == reference.token_ids[0]
            torch.testing.assert_close(torch.tensor(own.log_probs), torch.tensor(reference.log_probs), **TOLERANCE)
        assert (one.features is None) == (other.features is None)
        if one.features is not None:
            np.testing.assert_allclose(one.features, other.features, atol=5e-4, rtol=1e-3)


def test_two_ranks_are_one(two_ranks: Served, folder: Path, projection: Path) -> None:
    """Greedy, seeded, truncated and penalised sessions in common steps, with features: the same on two ranks."""
    check_same(rounds(two_ranks.engine()), rounds(one_rank(folder, projection)))


def test_masks_hold_over_two_ranks(two_ranks: Served, folder: Path) -> None:
    """Where a structure allows some tokens alone, two ranks choose what one does."""
    assert masked_choices(two_ranks.engine()) == masked_choices(one_rank(folder))


def test_two_ranks_on_static_buffers_are_one(folder: Path, projection: Path) -> None:
    """The same rounds with every tree in a bucket, its choices brought together behind it."""
    with served(folder, 2, feature_projection=projection, graphs="on", kv_page_size=8) as started:
        engine = started.engine()
        found = rounds(engine)
        num_chunk_steps = engine.num_missed_graphs
        check_same(found, rounds(one_rank(folder, projection)))
        prefill(engine, 1, [1, 2, 3])
        score(engine, 1, DraftTree.lone_root(4))
        assert engine.num_missed_graphs == num_chunk_steps + 1


def test_the_ranks_keep_what_was_asked_of_the_last_step(two_ranks: Served, folder: Path) -> None:
    """Processed probabilities of a node of a seeded, a truncated and a penalised session are those of one rank."""
    tree = DraftTree((4, 7, 8, 9), (-1, 0, 1, 0))
    for sampling in (SEEDED, SAMPLED, PENALISED):
        both = []
        for engine in (two_ranks.engine(), one_rank(folder)):
            prefill(engine, 1, [9, 8, 7], sampling)
            distributions = score(engine, 1, tree).distributions
            assert distributions is not None
            both.append(np.stack([distributions.probabilities(node) for node in (2, 3)]))
            engine.release(1)
        np.testing.assert_allclose(both[0], both[1], atol=1e-4)


def test_a_model_that_computes_nothing_finite_fails_its_step_alone(folder: Path, tmp_path: Path) -> None:
    """A NaN in one rank's span of the vocabulary is told, not chosen; the ranks go on."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][VOCABULARY_SIZE - 1, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with served(tmp_path, 2) as started:
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="not finite"):
                prefill(started.engine(), 1, [1, 2, 3])


def test_the_death_of_any_rank_is_told_at_once(folder: Path) -> None:
    """A killed rank ends the others; whoever watches hears of it without a step, and the next step says so."""
    told: list[str] = []
    heard = threading.Event()

    def hear(reason: str) -> None:
        told.append(reason)
        heard.set()

    with served(folder, 2) as started:
        started.ranks.watch(hear)
        engine = started.engine()
        prefill(engine, 1, [1, 2, 3])
        os.kill(started.ranks.process_ids[1], signal.SIGKILL)
        assert heard.wait(timeout=30)
        assert "rank 1 ended with exit code -9" in told[0]
        with pytest.raises(EngineLost, match="rank 1"):
            score(engine, 1, DraftTree.lone_root(4))


@pytest.mark.parametrize(
    ("tp_size", "options", "reason"),
    [
        (3, {}, r"8 KV heads \(16 heads\) do not divide over 3 ranks; tp_size may be 1, 2, 4, 8"),
        (16, {}, "8 KV heads .* over 16 ranks"),
        (2, {"dtype": "int8"}, "int8 is computed on one rank, tp_size is 2"),
        (4, {"nnodes": 3}, "tp_size is 4, it must be a multiple of nnodes, 3"),
        (4, {"nnodes": 2}, "dist_init_addr is not set"),
        (4, {"nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, "the ranks are 0 to 1"),
        (2, {"device": "cuda:1"}, "device is cuda:1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(folder: Path, tp_size: int, options: dict[str, Any], reason: str) -> None:
    """Before any process is started, with the numbers."""
    with pytest.raises(ValueError, match=reason):
        StartedTransformers(TensorParallelOptions(folder, tp_size, **options), "tiny")


def test_the_forward_of_transformers_has_one_rank(folder: Path) -> None:
    """Only the lean forward is divided."""
    with pytest.raises(Unsupported, match="the forward of transformers runs on one rank"):
        StartedTransformers(TensorParallelOptions(folder, 2), "tiny", "transformers")


@pytest.mark.model
@pytest.mark.timeout(600)
def test_three_ranks_with_three_kv_heads_are_one() -> None:
    """SmolLM2-135M, 9 heads in 3 groups: greedy, seeded, truncated and penalised, batched, in pages, with features."""
    directory, drafter = resolve("smollm2-135m", quiet=True), Path("drafters/smollm2-135m")
    options = {"max_tree_nodes": MAX_TREE_NODES, "kv_page_size": 16, "feature_projection": drafter}
    with served(directory, 3, **options) as started:
        found = rounds(started.engine(), num_rounds=1)
        shares = [memory.weight_bytes for memory in started.ready.memory]
    reference = TransformersTarget.load(directory, kv_tokens=1024, **options)
    check_same(found, rounds(reference, num_rounds=1))
    assert max(shares) < 0.4 * 4 * 162_826_560  # parameters with the tied head counted twice, as it is held
