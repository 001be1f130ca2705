"""The block drafter computes what the public reference computes, from the reference's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draft_service.engine import Proposal
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.dflash.model import BlockIngestion, DFlashCache, DFlashConfig, DFlashDrafter, draft_blocks
from draft_service.engines.target_tensors import load_tensors
from tests.conformance.reference import Reference, reference
from treewire.checkpoint import feature_projection, spread_taps
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit
from verify_service.engines.features import FeatureTaps

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_target_layers": 12,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 5, 9]},
}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 10,
    "use_sliding_window": True,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, block 16": {"num_hidden_layers": 1, "block_size": 16, "dflash_config": {"mask_token_id": 0}},
    "sliding windows": _SLIDING,
    "sliding windows, not causal": {**_SLIDING, "is_causal": False},
    "causal": {"is_causal": True},
    "yarn": {"rope_parameters": _YARN},
    "yarn and sliding windows": {"rope_parameters": _YARN, **_SLIDING},
    "llama 3 frequencies": {"rope_parameters": _LLAMA_3},
    "biases": {"attention_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "scaled embeddings, capped logits": {
        "dflash_config": {
            "mask_token_id": 5,
            "target_layer_ids": [1, 5, 9],
            "input_embedding_scale": 8.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 15.0,
        }
    },
}
ROUNDS = (37, 1, 3, 6, 2)  # newly committed positions of each round, the prompt first


def checkpoint(folder: Path, made: Reference, model_type: str = "qwen3") -> Path:
    """The reference's own way to save, with the target's tensors beside it."""
    made.model.save_pretrained(folder / "drafter")
    path = folder / "drafter" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    (folder / "target").mkdir()
    save_file(
        {"model.embed_tokens.weight": made.embedding, "lm_head.weight": made.head}, folder / "target" / "model.safetensors"
    )
    (folder / "target" / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "tie_word_embeddings": False}))
    return folder / "drafter"


def check_rounds(made: Reference, drafter: DFlashDrafter, taps: FeatureTaps) -> None:
    """The logits of several rounds, the cache carried from each to the next, are the reference's."""
    generator = torch.Generator().manual_seed(1)
    cache = DFlashCache(drafter.config)
    num_taps, size = len(drafter.config.tapped_layers), drafter.config.hidden_size
    for round_number, count in enumerate(ROUNDS):
        hidden = torch.randn(count, num_taps, size, generator=generator)
        expected = made.logits(hidden.flatten(1), bonus_id=round_number + 11)
        features = taps.of_taps(list(hidden.unbind(1)))
        computed = draft_blocks(drafter, [BlockIngestion(cache, features, round_number + 11)])[0]
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def loaded(path: Path, made: Reference) -> tuple[DFlashDrafter, FeatureTaps]:
    """What treewire makes of a checkpoint: the drafter, and the fusion that is the verify side's."""
    drafter = DFlashDrafter(DFlashConfig.from_json(json.loads((path / "config.json").read_text())), made.embedding, made.head)
    drafter.load_state_dict(load_tensors(path, device="cpu", dtype=torch.float32))
    taps = FeatureTaps.load(path, num_layers=12, hidden_size=drafter.config.hidden_size, device=torch.device("cpu"))
    return drafter.eval(), taps


@pytest.mark.parametrize("name", SHAPES)
def test_same_logits_as_the_reference(name: str, tmp_path: Path) -> None:
    """Round after round, a checkpoint gives the logits that the reference gives, whatever its shape."""
    made = Reference(**{**_SMALL, **SHAPES[name]})
    check_rounds(made, *loaded(checkpoint(tmp_path, made), made))


def test_same_logits_as_the_reference_for_llama(tmp_path: Path) -> None:
    """A drafter of Llama's type is the same without norms on its heads."""
    made = Reference(heads_have_norms=False, **_SMALL)
    check_rounds(made, *loaded(checkpoint(tmp_path, made, "llama"), made))


@pytest.mark.parametrize("num_layers", [8, 12, 24, 30, 36, 61])
@pytest.mark.parametrize("num_taps", [1, 2, 5, 6])
def test_same_taps_as_the_reference(num_layers: int, num_taps: int) -> None:
    """A checkpoint that names no taps taps the layers that the reference taps."""
    assert list(spread_taps(num_layers, num_taps)) == reference().build_target_layer_ids(num_layers, num_taps)


def test_same_features_as_the_reference(tmp_path: Path) -> None:
    """The verify side picks the hidden states that the reference picks, and fuses them as its model does."""
    made = Reference(**_SMALL)
    path = checkpoint(tmp_path, made)
    hidden_states = [torch.randn(1, 9, 64) for _ in range(13)]
    picked = reference().extract_context_feature(hidden_states, made.model.target_layer_ids)
    expected = made.model.hidden_norm(made.model.fc(picked))[0]
    taps = FeatureTaps.load(path, num_layers=12, hidden_size=64, device=torch.device("cpu"))
    torch.testing.assert_close(taps.of_hidden_states(hidden_states, torch.arange(9)), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_same_marginals_as_the_reference(temperature: float, tmp_path: Path) -> None:
    """The engine's marginals are the log-softmax of the reference's logits at the session's temperature, best first."""
    made = Reference(**_SMALL)
    engine = load_feature_drafter(checkpoint(tmp_path, made), tmp_path / "target", width=151)
    taps = FeatureTaps.load(tmp_path / "drafter", num_layers=12, hidden_size=64, device=torch.device("cpu"))
    hidden = torch.randn(20, 3, 64)
    engine.start(1, list(range(20)), Sampling(temperature=temperature, seed=3))
    features = taps.of_taps(list(hidden.unbind(1))).numpy()
    (marginals,) = engine.propose([Proposal(1, Commit((42,), 21), 7, 151, features)])
    logits = made.logits(hidden.flatten(1), bonus_id=42) / (temperature or 1.0)
    expected = logits.log_softmax(-1).numpy()
    assert marginals.token_ids.shape == (7, 151)
    shipped = np.take_along_axis(expected, marginals.token_ids.astype(np.int64), 1)
    np.testing.assert_allclose(marginals.log_probs, shipped, rtol=1e-4, atol=1e-4)
    if temperature == 0.0:
        np.testing.assert_array_equal(marginals.token_ids[:, 0], expected.argmax(1))


def test_projection_hash_is_of_taps_and_weights(tmp_path: Path) -> None:
    """Two checkpoints have one hash exactly if their features mean the same."""
    first, second = (Reference(seed=seed, **_SMALL) for seed in (0, 1))
    paths = [checkpoint(tmp_path / name, made) for name, made in (("a", first), ("b", second))]
    hashes = {feature_projection(path).hash for path in paths}
    config = json.loads((paths[0] / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 5, 10]
    (paths[0] / "config.json").write_text(json.dumps(config))
    hashes.add(feature_projection(paths[0]).hash)
    assert len(hashes) == 3
