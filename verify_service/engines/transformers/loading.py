"""This file is how a model comes into memory, and which models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from treewire.vocabulary import load_tokenizer, vocabulary_hash
from verify_service.engine import Unsupported

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GGUF_SUFFIX = ".gguf"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Rotary frequencies that change with the longest sequence of the batch: a row would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def load_config(model: str | Path) -> PreTrainedConfig:
    """The text model's configuration. Raises Unsupported for what the engine does not serve."""
    config = AutoConfig.from_pretrained(**_source(model)).get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise Unsupported(f"{config.model_type} is an encoder-decoder; the engine serves decoder-only models")
    other_layers = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other_layers:
        raise Unsupported(
            f"{config.model_type} has layers of type {', '.join(sorted(other_layers))}; the engine serves "
            f"{', '.join(sorted(_LAYER_TYPES))}: a tree would need the state of other layers forked for each branch"
        )
    batch_dependent = _rope_types(config) & _BATCH_DEPENDENT_ROPE
    if batch_dependent:
        raise Unsupported(
            f"{config.model_type} has rotary embeddings of type {', '.join(sorted(batch_dependent))}, "
            "which make a sequence's result depend on the longest sequence of the step"
        )
    return config


def load_model(model: str | Path, device: str, dtype: str) -> PreTrainedModel:
    """The model, ready for inference. Weights from safetensors or GGUF only; code from the model's repository is never run.

    Raises Unsupported for recurrent and state-space models, ValueError if weights are missing.
    """
    loaded, report = AutoModelForCausalLM.from_pretrained(
        **_source(model), dtype=_DTYPES[dtype], use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    if report["missing_keys"]:  # transformers would fill them with random numbers
        raise ValueError(f"{model} lacks the weights {', '.join(sorted(report['missing_keys']))}")
    if loaded._is_stateful:
        raise Unsupported(f"{loaded.config.model_type} keeps a recurrent state; a tree would need it forked for each branch")
    return loaded.to(device).eval()


def context_limits(config: PreTrainedConfig) -> tuple[int, ...]:
    """The length in tokens that the model was made for; empty if it does not say."""
    made_for: int | None = getattr(config, "max_position_embeddings", None)
    return () if made_for is None else (made_for,)


def tokenizer_hash_of(model: str | Path) -> str:
    """Hash of the vocabulary in the model's tokenizer.json; empty, which is "unknown", where there is none (as in GGUF)."""
    if str(model).endswith(_GGUF_SUFFIX):
        return ""
    path = cached_file(str(model), "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    return vocabulary_hash(load_tokenizer(Path(path).parent)) if path else ""


def end_token_ids_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end a turn."""
    end = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    if end is None:
        return ()
    return (end,) if isinstance(end, int) else tuple(end)


def _source(model: str | Path) -> dict[str, Any]:
    """Where transformers finds it: a directory, a hub id, or a GGUF file in a directory."""
    if not str(model).endswith(_GGUF_SUFFIX):
        return {"pretrained_model_name_or_path": str(model)}
    path = Path(model)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The types of rotary embedding, of the model or of each type of layer."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters["rope_type"] for parameters in (by_layer_type or [rope]) if "rope_type" in parameters}
