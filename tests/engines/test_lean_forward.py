"""The lean forward computes what transformers' modules compute, and in int8 the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines.target_contract import random_tree
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.core.tree import DraftTree
from treewire.int8 import Int8Linear
from treewire.vocabulary import load_tokenizer
from treewire.weights import resolve
from verify_service.attention.layout import Segment, StepLayout
from verify_service.engine import Unsupported
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.linear import FineInt8Linear
from verify_service.engines.transformers.segments import chain_segment, tree_segment
from verify_service.engines.transformers.selection import Forward, ForwardKind, load_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def forward(folder: Path, dtype: str = "float32", kind: ForwardKind = "lean", kv_slots: int = 512) -> Forward:
    """A loaded forward."""
    return load_model(folder, kind=kind, device="cpu", dtype=dtype, max_context=None, kv_slots=kv_slots).forward


def run(model: Forward, token_ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
    """Logits of every row of a step."""
    return model.logits(torch.tensor(token_ids), StepLayout(segments), torch.arange(len(token_ids)))


def chain(context: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> Segment:
    """The next tokens of a sequence."""
    return chain_segment(context, slots, CPU)


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
    ids=["llama", "llama with biases", "llama 3, tied", "qwen2", "qwen3"],
)
def test_it_is_the_model_of_transformers(tmp_path: Path, model_type: str, shape: dict[str, Any]) -> None:
    """Logits of a long text equal transformers' own to rounding, whatever the family's peculiarities."""
    save_tiny_model(tmp_path, model_type, **shape)
    _move_from_initial_values(tmp_path)
    token_ids = [random.Random(1).randrange(VOCABULARY_SIZE) for _ in range(90)]
    computed = run(forward(tmp_path), token_ids, [chain(np.arange(0), np.arange(90))])
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mistral"}, "not mistral"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type yarn"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_what_it_would_get_wrong_is_refused(config: dict[str, Any], reason: str) -> None:
    """A configuration that asks for more than the forward computes is refused with the reason."""
    with pytest.raises(Unsupported, match=reason):
        Architecture.from_config({"model_type": "llama", **config})


def test_int8_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """The message says that only the lean forward has int8, and why it does not take the model."""
    save_tiny_model(tmp_path, "mistral")
    with pytest.raises(Unsupported, match=r"int8 is computed by the lean forward alone: .*not mistral"):
        forward(tmp_path, "int8", "auto")


@pytest.mark.parametrize(("kind", "tolerance"), [(Int8Linear, 0.03), (FineInt8Linear, 0.015)])
def test_an_int8_product_is_near_the_product(kind: type[Int8Linear], tolerance: float) -> None:
    """Rounding moves a product by little; in two parts by less, rows of zeros stay zeros, and biases are added.

    Where weights have one bit less, for want of VNNI, their rounding alone moves it by 0.012.
    """
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(40, 96, generator=generator), torch.randn(40, generator=generator)
    rows = torch.cat((torch.randn(7, 96, generator=generator), torch.zeros(1, 96)))
    difference = kind(weight, bias)(rows) - (rows @ weight.T + bias)
    assert difference.norm() < tolerance * (rows @ weight.T).norm()
    assert torch.equal(kind(weight, None)(rows)[7], torch.zeros(40))


@pytest.mark.parametrize("kind", [Int8Linear, FineInt8Linear])
def test_an_int8_row_is_the_same_bits_in_any_batch(kind: type[Int8Linear]) -> None:
    """A row's outputs do not depend on the rows beside it, be they huge or many."""
    generator = torch.Generator().manual_seed(3)
    product = kind(torch.randn(48, 64, generator=generator), None)
    rows = torch.randn(33, 64, generator=generator) * torch.logspace(-3, 5, 33)[:, None]
    together = product(rows)
    assert all(torch.equal(product(rows[number : number + 1])[0], together[number]) for number in range(33))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_int8_is_invariant_on_tiny_models(tmp_path: Path, model_type: str) -> None:
    """Logits in int8 are the same bits token by token, in chunks, in trees of 8 and 17, and beside other sessions."""
    save_tiny_model(tmp_path, model_type, head_dim=16)
    token_ids = [random.Random(4).randrange(VOCABULARY_SIZE) for _ in range(60)]
    _check_invariance(forward(tmp_path, "int8", kv_slots=1024), token_ids, VOCABULARY_SIZE, num_trees=24)


@pytest.mark.model
def test_int8_is_invariant_on_the_real_small_model() -> None:
    """SmolLM2-135M in int8: the same bits token by token, in chunks, in trees of 8 and 17, and beside other sessions."""
    directory = resolve("smollm2-135m", quiet=True)
    text = "def add(a, b):\n    return a + b\n\nThe capital of France is Paris, a city of two million people on the Seine."
    token_ids = load_tokenizer(directory).encode(text).ids
    _check_invariance(forward(directory, "int8", kv_slots=1024), token_ids, 49152, num_trees=10)


def _check_invariance(model: Forward, token_ids: list[int], vocabulary_size: int, num_trees: int) -> None:
    length, rng = len(token_ids), random.Random(5)
    places = np.arange(length)
    expected = run(model, token_ids, [chain(places[:0], places)])
    alone = [run(model, [token_ids[place]], [chain(200 + places[:place], 200 + places[place:][:1])]) for place in places]
    assert torch.equal(torch.cat(alone), expected)
    scattered = 400 + np.array(rng.sample(range(300), length))
    starts = range(0, length, 7)
    chunks = [run(model, token_ids[at : at + 7], [chain(scattered[:at], scattered[at : at + 7])]) for at in starts]
    assert torch.equal(torch.cat(chunks), expected)
    for _ in range(num_trees):
        at, num_nodes = rng.randrange(1, length - 8), rng.choice((8, 17))
        spine = token_ids[at + 1 : at + rng.randrange(1, 8)]
        tree = _shuffled(rng, random_tree(rng, token_ids[at], vocabulary_size, num_nodes, spine))
        beside = rng.randrange(1, length - 1)
        segments = [
            tree_segment(scattered[:at], 720 + np.array(rng.sample(range(40), num_nodes)), tree, CPU),
            chain(places[:beside], np.array([800])),
        ]
        logits = run(model, [*tree.token_ids, token_ids[beside]], segments)
        assert torch.equal(logits[num_nodes], expected[beside])
        node = 0
        for depth, token_id in enumerate([token_ids[at], *spine]):
            node = node if depth == 0 else next(child for child in tree.children[node] if tree.token_ids[child] == token_id)
            assert torch.equal(logits[node], expected[at + depth])


def _shuffled(rng: random.Random, tree: DraftTree) -> DraftTree:
    """The same tree with its nodes in another order, parents first still."""
    waiting, order = [0], []
    while waiting:
        node = waiting.pop(rng.randrange(len(waiting)))
        order.append(node)
        waiting.extend(tree.children[node])
    number = {node: place for place, node in enumerate(order)}
    parents = [-1, *(number[tree.parents[node]] for node in order[1:])]
    return DraftTree(tuple(tree.token_ids[node] for node in order), tuple(parents))


def _move_from_initial_values(folder: Path) -> None:
    """Random norms and biases: as they are initialised, ones and zeros, nobody would notice their loss."""
    generator = torch.Generator().manual_seed(6)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            weights[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
