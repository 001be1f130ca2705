"""This file makes tiny random models, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY_SIZE = 97

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # far from uniform, so that the text depends on what attention sees
}


def tiny_model(model_type: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A model of two layers with random weights in float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **shape})
    return AutoModelForCausalLM.from_config(config).eval()


def save_tiny_model(folder: Path, model_type: str, seed: int = 0, **shape: Any) -> Path:
    """The same, saved to a folder."""
    tiny_model(model_type, seed, **shape).save_pretrained(folder)
    return folder


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """The same as a GGUF file in float32; for Qwen3 of head size 128, whose rows are in the same order in both."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
