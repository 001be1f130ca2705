"""The transformers engine keeps the contract, and computes what transformers computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.engines.target_contract import (
    GREEDY,
    MAX_CONTEXT,
    MAX_TREE_NODES,
    SAMPLED,
    Subject,
    TargetContract,
    continuation,
    prefill,
    random_tree,
    score,
)
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model, tiny_model, write_gguf
from treewire.core.acceptance import Acceptance, accept
from treewire.core.noise import noise_row
from treewire.core.processing import choose as core_choose
from treewire.core.processing import process
from treewire.core.tree import DraftTree
from treewire.kv.pages import KvExhausted
from treewire.vocabulary import load_tokenizer, simulated_tokenizer, vocabulary_hash
from treewire.weights import resolve
from verify_service.engine import PrefillChunk, Scoring, Target, Unsupported
from verify_service.engines.transformers import TransformersTarget

KV_TOKENS = 1024


def load(folder: Path, **settings: Any) -> TransformersTarget:
    """An engine of the contract's sizes."""
    sizes: dict[str, Any] = {"max_tree_nodes": MAX_TREE_NODES, "max_context": MAX_CONTEXT, "kv_tokens": KV_TOKENS}
    return TransformersTarget.load(folder, **{**sizes, **settings})


@torch.inference_mode()
def own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The model's own logits after the last of these tokens."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param, head_dim=16)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


class TestTransformersTarget(TargetContract):
    """The contract, on two kinds of tiny models."""

    @pytest.fixture
    def subject(self, folder: Path, model: PreTrainedModel) -> Subject:
        """The engine, with transformers itself as the oracle."""
        return Subject(make=lambda: load(folder), next_token_id=lambda token_ids: int(own_logits(model, token_ids).argmax()))


class TestGeneralForward(TargetContract):
    """The contract, on transformers' own modules and pages of eight slots."""

    @pytest.fixture
    def subject(self, folder: Path, model: PreTrainedModel) -> Subject:
        """The engine, with transformers itself as the oracle."""
        return Subject(
            make=lambda: load(folder, forward="transformers", kv_page_size=8),
            next_token_id=lambda token_ids: int(own_logits(model, token_ids).argmax()),
        )


class TestInt8Target(TargetContract):
    """The contract in int8 and pages of sixteen slots; the oracle is the same engine, fed with the whole text at once."""

    @pytest.fixture
    def subject(self, folder: Path) -> Subject:
        """The engine, and a fresh one for each text as the oracle."""

        def next_token_id(token_ids: Sequence[int]) -> int:
            return prefill(load(folder, dtype="int8"), 1, token_ids).token_ids[0]

        return Subject(make=lambda: load(folder, dtype="int8", kv_page_size=16), next_token_id=next_token_id)


def test_the_target_is_described(folder: Path) -> None:
    """What the engine serves comes from the model's files and the caller's limits."""
    assert load(folder).target == Target("transformers", str(folder), VOCABULARY_SIZE, "", MAX_TREE_NODES, MAX_CONTEXT, (2,))
    assert load(folder, max_context=None).target.max_context == 256
    assert load(folder, max_context=1000).target.max_context == 256


def test_the_tokenizer_of_the_folder_is_hashed(tmp_path: Path) -> None:
    """The target's tokenizer hash is that of the tokenizer.json beside the weights."""
    tokenizer = simulated_tokenizer(300)
    tokenizer.save(str(save_tiny_model(tmp_path, "llama", vocab_size=300) / "tokenizer.json"))
    assert load(tmp_path).target.tokenizer_hash == vocabulary_hash(tokenizer)


def test_greedy_text_through_trees_is_that_of_generate(folder: Path, model: PreTrainedModel) -> None:
    """A whole generation through draft trees equals `model.generate(do_sample=False)`."""
    rng = random.Random(20)
    prompt = [rng.randrange(3, VOCABULARY_SIZE) for _ in range(12)]
    generated = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=48, max_new_tokens=48, eos_token_id=None)
    expected = generated[0, len(prompt) :].tolist()

    def guess(committed: list[int]) -> DraftTree:
        return random_tree(rng, committed[-1], VOCABULARY_SIZE, 10, expected[len(committed) :][: rng.randrange(5)])

    assert continuation(load(folder), 1, prompt, 48, guess=guess) == expected


def test_node_probabilities_are_the_log_softmax_of_the_path(folder: Path, model: PreTrainedModel) -> None:
    """Log-probs of a node are the model's own after the node's path, to rounding."""
    engine, prompt = load(folder), [5, 6, 7, 8]
    root = prefill(engine, 1, prompt, num_node_probabilities=VOCABULARY_SIZE).token_ids[-1]
    tree = random_tree(random.Random(21), root, VOCABULARY_SIZE, 12)
    for node, likely in enumerate(score(engine, 1, tree).node_probabilities):
        path = [*prompt, *(tree.token_ids[step] for step in tree.path(node))]
        expected = own_logits(model, path).log_softmax(-1)[list(likely.token_ids)]
        torch.testing.assert_close(torch.tensor(likely.log_probs), expected, atol=2e-4, rtol=1e-4)


def test_a_sample_is_the_reference_of_the_core(folder: Path, model: PreTrainedModel) -> None:
    """A sampled token is the argmax of the core's processed log-probs plus the core's noise at the token's position."""
    engine, prompt = load(folder), [5, 6, 7, 8]
    root = prefill(engine, 1, prompt, SAMPLED).token_ids[-1]
    tree = random_tree(random.Random(23), root, VOCABULARY_SIZE, 16)
    for node, chosen in enumerate(score(engine, 1, tree).token_ids):
        text = [*prompt, *(tree.token_ids[step] for step in tree.path(node))]
        log_probs = process(own_logits(model, text)[None].numpy(), SAMPLED)
        noise = noise_row(SAMPLED.seed, len(text), VOCABULARY_SIZE)
        assert chosen == core_choose(log_probs, noise[None])[0]


def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path: Path) -> None:
    """A model loaded from GGUF gives the tokens of the same model loaded from safetensors."""
    model = tiny_model("qwen3", head_dim=128)
    model.save_pretrained(tmp_path / "safetensors")
    write_gguf(model, tmp_path / "tiny.gguf")
    texts = [continuation(load(path), 1, [3, 4, 5], 12) for path in (tmp_path / "tiny.gguf", tmp_path / "safetensors")]
    assert texts[0] == texts[1]


def test_lower_precision_is_served(folder: Path) -> None:
    """A model in bfloat16 passes its probe and answers trees."""
    engine = load(folder, dtype="bfloat16")
    root = prefill(engine, 1, [1, 2, 3]).token_ids[-1]
    assert len(score(engine, 1, DraftTree((root, 4, 5), (-1, 0, 0))).token_ids) == 3


@pytest.mark.model
def test_the_real_small_model_through_trees_is_that_of_generate() -> None:
    """SmolLM2-135M through draft trees gives the tokens of `model.generate(do_sample=False)`."""
    directory = resolve("smollm2-135m", quiet=True)
    model, rng = AutoModelForCausalLM.from_pretrained(directory).eval(), random.Random(24)
    prompt = load_tokenizer(directory).encode("The capital of France is").ids
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()

    def guess(committed: list[int]) -> DraftTree:
        return random_tree(rng, committed[-1], 49152, 9, expected[len(committed) :][: rng.randrange(5)])

    assert continuation(load(directory), 1, prompt, len(expected), guess=guess) == expected


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_a_sliding_window_reaches_across_prefix_and_tree(tmp_path: Path, model_type: str) -> None:
    """In models with sliding windows, trees and chunks beyond the window give the model's own tokens."""
    shape: dict[str, Any] = {"sliding_window": 5, "head_dim": 16}
    if model_type == "gemma3_text":
        shape["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model(model_type, **shape)
    model.save_pretrained(tmp_path)
    engine, rng = load(tmp_path), random.Random(22)
    prompt = [rng.randrange(VOCABULARY_SIZE) for _ in range(14)]
    root = prefill(engine, 1, prompt, chunk_size=8).token_ids[-1]
    tree = random_tree(rng, root, VOCABULARY_SIZE, 16, [rng.randrange(VOCABULARY_SIZE) for _ in range(8)])
    expected = [
        int(own_logits(model, [*prompt, *(tree.token_ids[step] for step in tree.path(node))]).argmax())
        for node in range(len(tree))
    ]
    assert list(score(engine, 1, tree).token_ids) == expected


def test_two_engines_in_one_process_do_not_meet(tmp_path: Path) -> None:
    """Steps of two engines, interleaved, are those of each alone."""
    folders = [save_tiny_model(tmp_path / str(seed), "llama", seed) for seed in (1, 2)]
    alone = [continuation(load(folder), 1, [1, 2, 3], 8) for folder in folders]
    engines = [load(folder) for folder in folders]
    texts = [list(prefill(engine, 1, [1, 2, 3]).token_ids) for engine in engines]
    for _ in range(7):
        for engine, text in zip(engines, texts, strict=True):
            tree = DraftTree.lone_root(text[-1])
            acceptance = accept(tree, score(engine, 1, tree).token_ids)
            engine.keep(1, acceptance)
            text.append(acceptance.next_token_id)
    assert texts == alone
    assert alone[0] != alone[1]


def test_a_full_store_refuses_an_open_and_survives(folder: Path) -> None:
    """A prompt for which there is no room is refused with the numbers; the open sessions go on."""
    engine = load(folder, kv_tokens=60)
    root = prefill(engine, 1, [1] * 20).token_ids[-1]
    with pytest.raises(KvExhausted, match=r"session 2 needs 44 KV slots, 40 of 60 are free"):
        engine.open(2, [2] * 20, GREEDY)
    assert engine.num_sessions == 1
    score(engine, 1, DraftTree.lone_root(root))
    engine.release(1)
    engine.open(2, [2] * 20, GREEDY)


def test_a_full_store_refuses_a_step_and_survives(folder: Path) -> None:
    """A step whose trees do not fit names a session; without that one it runs, and gives what it would have given."""
    engine = load(folder, kv_tokens=50, max_tree_nodes=20)
    roots = [prefill(engine, session, [session] * 10).token_ids[-1] for session in (1, 2)]
    trees = [DraftTree((root, *range(19)), (-1, *[0] * 19)) for root in roots]
    free, computed = engine.num_free_slots, engine.positions_computed
    with pytest.raises(KvExhausted) as refusal:
        engine.step([Scoring(1, trees[0]), Scoring(2, trees[1])])
    assert (refusal.value.session, refusal.value.num_needed, refusal.value.num_free) == (2, 20, 10)
    assert (engine.num_free_slots, engine.positions_computed) == (free, computed)
    first = score(engine, 1, trees[0])
    engine.keep(1, accept(trees[0], first.token_ids))
    assert len(score(engine, 2, trees[1]).token_ids) == 20


def test_a_store_smaller_than_a_tree_is_refused(folder: Path) -> None:
    """An engine that could never score its largest tree is not made."""
    with pytest.raises(ValueError, match=r"kv_tokens is 24, .* 24 nodes"):
        load(folder, kv_tokens=MAX_TREE_NODES)


def test_slots_are_reused_in_any_order(folder: Path, model: PreTrainedModel) -> None:
    """Rows scattered over the store by other sessions' comings and goings are still this session's rows."""
    engine, prompt = load(folder, kv_tokens=120), [3, 4, 5]
    text = list(prefill(engine, 1, prompt).token_ids)
    for round_number in range(10):
        prefill(engine, 100 + round_number, [round_number] * (1 + round_number % 4))
        engine.release(100 + round_number - 2)
        tree = DraftTree((text[-1], 9, int(own_logits(model, [*prompt, *text]).argmax())), (-1, 0, 0))
        acceptance = accept(tree, score(engine, 1, tree).token_ids)
        assert acceptance.nodes == (0, 2)
        engine.keep(1, acceptance)
        text.extend(acceptance.token_ids(tree))
    assert text == continuation(engine, 2, prompt, len(text))


def test_a_chunk_and_a_tree_keep_only_what_they_should(folder: Path, model: PreTrainedModel) -> None:
    """A caller may keep less than the target would have accepted, and goes on from there."""
    engine, prompt = load(folder), [3, 4, 5]
    engine.open(1, prompt, GREEDY)
    engine.step([PrefillChunk(1, (3, 4), last=False)])
    engine.step([PrefillChunk(1, (5,), last=True)])
    score(engine, 1, DraftTree((10, 11, 12, 13), (-1, 0, 1, 2)))
    engine.keep(1, Acceptance((0, 1), 20))
    expected = int(own_logits(model, [*prompt, 10, 11, 20]).argmax())
    assert score(engine, 1, DraftTree.lone_root(20)).token_ids == (expected,)


@pytest.mark.parametrize(
    ("model_type", "shape", "reason"),
    [
        ("gemma2", {"head_dim": 16}, "softcap"),
        ("falcon", {"num_kv_heads": 2}, "attention interface"),
        ("qwen3_next", {"head_dim": 16, "num_experts": 2}, "linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_models_that_trees_would_get_wrong_are_refused(
    tmp_path: Path, model_type: str, shape: dict[str, Any], reason: str
) -> None:
    """A model whose attention is more than ours computes, or keeps other state, is refused with the reason at load."""
    with pytest.raises(Unsupported, match=reason):
        load(save_tiny_model(tmp_path, model_type, **shape))


def test_state_space_models_are_refused(tmp_path: Path) -> None:
    """Mamba is refused with the reason."""
    MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="linear_attention"):
        load(tmp_path)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    """T5 is refused with the reason."""
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Weights in a pickle, which could run code, are not read."""
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A checkpoint without one of the model's weights is refused by its name, not filled with random numbers."""
    save_tiny_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match=r"float8.*float32, bfloat16, float16, int8"):
        load(folder, dtype="float8")
