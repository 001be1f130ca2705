"""This file makes tiny random drafters that read features, saved in the format of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_service.engines.dflash.model import DFlashConfig, DFlashDrafter
from draft_service.engines.recurrent.model import ARCHITECTURE, RecurrentConfig, RecurrentDrafter
from tests.engines.tiny_models import VOCABULARY_SIZE

HIDDEN_SIZE = 64

_SHAPE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}


def dflash_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a block drafter for the tiny targets, with changes."""
    return {**_SHAPE, **changes}


def save_dflash(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A block drafter with random weights."""
    config = dflash_config(**changes)
    torch.manual_seed(seed)
    nothing = torch.zeros(VOCABULARY_SIZE, config["hidden_size"])
    return save_checkpoint(folder, config, DFlashDrafter(DFlashConfig.from_json(config), nothing, nothing).state_dict())


def save_recurrent(folder: Path, seed: int = 0, num_candidates: int = 61, horizon: int = 4) -> Path:
    """A recurrent drafter with random weights that guesses every token but the first few."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": HIDDEN_SIZE,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rope_theta": 10000.0,
        "rms_epsilon": 1e-6,
        "tapped_layers": [0, 1],
        "num_candidates": num_candidates,
        "horizon": horizon,
    }
    config = {"architecture": ARCHITECTURE, **shape}
    nothing = torch.zeros(VOCABULARY_SIZE, HIDDEN_SIZE)
    candidates = torch.arange(VOCABULARY_SIZE - num_candidates, VOCABULARY_SIZE)
    return save_checkpoint(
        folder, config, RecurrentDrafter(RecurrentConfig.from_json(config), nothing, nothing, candidates).state_dict()
    )


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of a config and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
