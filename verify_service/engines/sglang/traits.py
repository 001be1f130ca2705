"""This file is what a model's config.json says that decides how, and whether, SGLang can run trees through it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WINDOWED_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
# Settings that only models with a recurrent state have (Mamba, gated delta, lightning attention, hybrids of them).
_RECURRENT_KEYS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "linear_attn_config",
    "linear_num_value_heads",
    "hybrid_override_pattern",
    "attn_layer_period",
)


@dataclass(frozen=True)
class ModelTraits:
    """What matters of a model. `max_positions` in tokens; None if the config does not say."""

    model_type: str
    vocabulary_size: int
    max_positions: int | None
    num_layers: int
    hidden_size: int
    is_mla: bool = False
    is_sparse: bool = False
    is_encoder_decoder: bool = False
    recurrent_sign: str = ""
    window_sign: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelTraits:
        """From a parsed config.json; of a multimodal model the text part counts. Raises ValueError if a size is missing."""
        text: Mapping[str, Any] = config.get("text_config") or config
        missing = [name for name in ("vocab_size", "num_hidden_layers", "hidden_size") if name not in text]
        if missing:
            raise ValueError(f"config.json has no {' and no '.join(missing)}")
        return cls(
            model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
            vocabulary_size=text["vocab_size"],
            max_positions=text.get("max_position_embeddings"),
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            is_mla=bool(text.get("kv_lora_rank")),
            is_sparse=bool(text.get("index_topk")),
            is_encoder_decoder=bool(config.get("is_encoder_decoder")),
            recurrent_sign=_recurrent_sign(text),
            window_sign=_window_sign(text),
        )

    @classmethod
    def read(cls, directory: Path) -> ModelTraits:
        """From a model's directory. Raises ValueError if it has no config.json that can be used."""
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no config.json")
        return cls.of(json.loads(path.read_text()))


def end_token_ids_of(directory: Path) -> tuple[int, ...]:
    """Tokens that end a turn, from generation_config.json or else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        end = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if end is not None:
            return (end,) if isinstance(end, int) else tuple(end)
    return ()


def _recurrent_sign(text: Mapping[str, Any]) -> str:
    """What in the config shows a recurrent state; empty if nothing does."""
    other_layers = sorted(set(text.get("layer_types") or ()) - _ATTENTION_LAYERS)
    if other_layers:
        return f"layers of type {', '.join(other_layers)}"
    return next((key for key in _RECURRENT_KEYS if text.get(key)), "")


def _window_sign(text: Mapping[str, Any]) -> str:
    """What in the config shows layers that see a window only; empty if nothing does."""
    windowed_layers = sorted(set(text.get("layer_types") or ()) & _WINDOWED_LAYERS)
    if windowed_layers:
        return f"layers of type {', '.join(windowed_layers)}"
    if text.get("attention_chunk_size"):
        return f"attention_chunk_size {text['attention_chunk_size']}"
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"sliding_window {text['sliding_window']}"
    return ""
