"""The SGLang engine keeps the contract, and computes what transformers computes, on one rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.target_contract import (
    GREEDY,
    MAX_TREE_NODES,
    SAMPLED,
    Subject,
    TargetContract,
    prefill,
    random_tree,
    score,
)
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from tests.sglang.served import WIDTHS, Served, served
from treewire.core.acceptance import Acceptance, accept
from treewire.core.noise import noise_row
from treewire.core.processing import choose as core_choose
from treewire.core.processing import process
from treewire.core.tree import DraftTree
from treewire.kv.pages import KvExhausted
from verify_service.engine import PrefillChunk, Scoring
from verify_service.engines.sglang import SglangTarget

_TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}

# Heads are few because each costs a kernel run by the interpreter: both have grouped queries or not, and a layer to tap.
SHAPES = {
    "llama": {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "qwen3": {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2},
}


@torch.inference_mode()
def own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The model's own logits after the last of these tokens."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits


@pytest.fixture(scope="module", params=sorted(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **SHAPES[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[Served]:
    """SGLang with that model on one rank."""
    with served(folder) as started:
        yield started


@pytest.fixture
def engine(one_rank: Served) -> SglangTarget:
    """A fresh engine over the rank."""
    return one_rank.engine()


class TestSglangTarget(TargetContract):
    """The contract, on two kinds of tiny models."""

    @pytest.fixture
    def subject(self, one_rank: Served, model: PreTrainedModel) -> Subject:
        """The engine, with transformers as the oracle."""
        return Subject(make=one_rank.engine, next_token_id=lambda token_ids: int(own_logits(model, token_ids).argmax()))


@pytest.mark.parametrize("num_nodes", [1, 8, 9, 10, 17, 18, MAX_TREE_NODES])
def test_every_width_is_exact(engine: SglangTarget, model: PreTrainedModel, num_nodes: int) -> None:
    """Trees that fill a width, and those padded up to one: log-probs of every node are the model's own after its path."""
    prompt = [5, 6, 7, 8, 9]
    root = prefill(engine, 1, prompt, num_node_probabilities=VOCABULARY_SIZE).token_ids[-1]
    tree = random_tree(random.Random(num_nodes), root, VOCABULARY_SIZE, num_nodes)
    padding_before = engine.padding_computed
    posterior = score(engine, 1, tree)
    assert engine.padding_computed - padding_before == min(width for width in WIDTHS if width >= num_nodes) - num_nodes
    for node, likely in enumerate(posterior.node_probabilities):
        path = [*prompt, *(tree.token_ids[step] for step in tree.path(node))]
        expected = own_logits(model, path).log_softmax(-1)[list(likely.token_ids)]
        torch.testing.assert_close(torch.tensor(likely.log_probs), expected, **_TOLERANCE)


def test_rounds_of_batches_are_exact(engine: SglangTarget, model: PreTrainedModel) -> None:
    """Three rounds of three sessions in common steps, a late prompt in between: every choice is the model's own."""
    rng = random.Random(31)
    texts = {session: [rng.randrange(VOCABULARY_SIZE) for _ in range(length)] for session, length in ((1, 4), (2, 11), (3, 7))}
    for session, text in texts.items():
        texts[session] = [*text, prefill(engine, session, text).token_ids[-1]]
    for round_number in range(3):
        trees = {
            session: random_tree(rng, text[-1], VOCABULARY_SIZE, rng.randrange(2, 12), [int(own_logits(model, text).argmax())])
            for session, text in texts.items()
        }
        late = [rng.randrange(VOCABULARY_SIZE) for _ in range(5)]
        engine.open(100 + round_number, late, GREEDY)
        chunk = PrefillChunk(100 + round_number, tuple(late), last=True)
        *posteriors, first = engine.step([*(Scoring(session, tree) for session, tree in trees.items()), chunk])
        assert first.token_ids == (int(own_logits(model, late).argmax()),)
        for (session, tree), posterior in zip(trees.items(), posteriors, strict=True):
            before = texts[session][:-1]
            for node, chosen in enumerate(posterior.token_ids):
                path = [*before, *(tree.token_ids[step] for step in tree.path(node))]
                assert chosen == int(own_logits(model, path).argmax())
            acceptance = accept(tree, posterior.token_ids)
            assert len(acceptance.nodes) > 1
            engine.keep(session, acceptance)
            texts[session] += acceptance.token_ids(tree)


def test_a_sample_is_the_reference_of_the_core(engine: SglangTarget, model: PreTrainedModel) -> None:
    """A sampled token is the argmax of the core's processed log-probs plus the core's noise at the token's position."""
    prompt = [5, 6, 7, 8]
    root = prefill(engine, 1, prompt, SAMPLED).token_ids[-1]
    tree = random_tree(random.Random(23), root, VOCABULARY_SIZE, 16)
    for node, chosen in enumerate(score(engine, 1, tree).token_ids):
        text = [*prompt, *(tree.token_ids[step] for step in tree.path(node))]
        log_probs = process(own_logits(model, text)[None].numpy(), SAMPLED)
        noise = noise_row(SAMPLED.seed, len(text), VOCABULARY_SIZE)
        assert chosen == core_choose(log_probs, noise[None])[0]


def test_slots_come_back_after_any_end(engine: SglangTarget) -> None:
    """Sessions that come and go through scattered slots leave the engine as empty as it was, and answers are not mixed up."""
    free = engine.num_free_slots
    reference = prefill(engine, 1, [3, 4, 5])
    for round_number in range(4):
        session = 10 + round_number
        assert prefill(engine, session, [3, 4, 5]) == reference
        tree = random_tree(random.Random(round_number), reference.token_ids[-1], VOCABULARY_SIZE, 9)
        score(engine, session, tree)
        engine.keep(session, Acceptance(tree.path(8), 7))
        score(engine, session, DraftTree((7, 1, 2), (-1, 0, 0)))
        engine.release(session - 1)
    engine.release(1)
    engine.release(13)
    assert (engine.num_sessions, engine.num_free_slots) == (0, free)


def test_without_room_nothing_changes(engine: SglangTarget) -> None:
    """A prompt for which there is no KV memory is refused by a message with what is needed and what is free."""
    num_sessions = 0  # of 90 tokens and fewer than there are rows
    with pytest.raises(KvExhausted, match="free"):
        for num_sessions in range(1, 1 + engine.num_free_slots):
            engine.open(num_sessions, [1] * 90, GREEDY)
    assert engine.num_sessions == num_sessions - 1
    engine.release(1)
    engine.open(num_sessions, [1] * 90, GREEDY)
