"""This file is the conversion of a Llama-type GGUF file to a directory in the Hugging Face layout, float32.

One tensor is in memory at a time. The directory holds model.safetensors, config.json, generation_config.json, tokenizer.json
and tokenizer_config.json; anything in the GGUF file that would be lost on the way is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treewire.gguf import QUANTISATIONS, GgufError, GgufFile, TensorInfo, readable_types

CONVERSION_VERSION = 1
"""Raised whenever the same GGUF file would give another directory; part of the cached directory's name."""

_ARCHITECTURE = "llama"
_CONTROL_TOKEN = 3
_HEADER_ALIGNMENT = 8
_FLOAT32_BYTES = 4
_EMBEDDING_TENSOR = "token_embd.weight"
_OUTPUT_TENSOR = "output.weight"
_OUTER_TENSORS = {
    _EMBEDDING_TENSOR: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _OUTPUT_TENSOR: "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Json = Mapping[str, object]


class Advance(Protocol):
    """Told how many bytes of how many are written."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama-type model. Raises GgufError if the file's metadata ask for more than a plain Llama."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    max_context: int
    norm_epsilon: float
    rope_theta: float

    @classmethod
    def from_gguf(cls, source: GgufFile) -> LlamaShape:
        """Read from the metadata."""
        hidden_size = source.integer("llama.embedding_length")
        num_heads = source.integer("llama.attention.head_count")
        head_size = source.integer("llama.rope.dimension_count")
        if head_size * num_heads != hidden_size:
            raise GgufError(
                f"{source.path.name} has {num_heads} heads of {head_size} rotated channels, hidden size {hidden_size}"
            )
        scaled = [key for key in source.metadata if key.startswith("llama.rope.scaling")]
        if scaled:
            raise GgufError(f"{source.path.name} scales its rotary embedding ({', '.join(scaled)}), which is not converted")
        return cls(
            vocabulary_size=len(source.texts("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            intermediate_size=source.integer("llama.feed_forward_length"),
            num_layers=source.integer("llama.block_count"),
            num_heads=num_heads,
            num_key_value_heads=source.integer("llama.attention.head_count_kv"),
            head_size=head_size,
            max_context=source.integer("llama.context_length"),
            norm_epsilon=source.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=source.number("llama.rope.freq_base"),
        )


def convert(source_path: Path, directory: Path, advance: Advance) -> None:
    """Write the model of a GGUF file into `directory`, which exists.

    Raises GgufError, before anything is written, if the architecture, a tensor or the tokenizer is not one it can convert
    without loss of meaning.
    """
    source = GgufFile(source_path)
    _check_convertible(source)
    shape = LlamaShape.from_gguf(source)
    tokenizer = build_tokenizer(source)
    _write_json(directory / "config.json", _config(source, shape))
    _write_json(directory / "generation_config.json", _special_token_ids(source))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(source, shape))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_tensors(source, shape, directory / "model.safetensors", advance)


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The tokenizer of the file: byte-level BPE, control tokens special. Raises GgufError for other kinds."""
    kind = (source.text("tokenizer.ggml.model"), source.text("tokenizer.ggml.pre"))
    if kind not in _PRE_TOKENIZERS:
        raise GgufError(f"{source.path.name} has a tokenizer of kind {kind}, converted are {list(_PRE_TOKENIZERS)}")
    tokens = source.texts("tokenizer.ggml.tokens")
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in source.texts("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    types = source.integers("tokenizer.ggml.token_type")
    control = [token for token, kind_number in zip(tokens, types, strict=True) if kind_number == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_PRE_TOKENIZERS: Mapping[tuple[str, str], Callable[[], pre_tokenizers.PreTokenizer]] = {
    ("gpt2", "smollm"): _smollm_pre_tokenizer,
}


def _check_convertible(source: GgufFile) -> None:
    architecture = source.text("general.architecture")
    if architecture != _ARCHITECTURE:
        raise GgufError(f"{source.path.name} has the architecture {architecture}, converted is {_ARCHITECTURE}")
    unread = {info.type_name for info in source.tensors.values() if info.type_number not in QUANTISATIONS}
    if unread:
        raise GgufError(f"{source.path.name} has tensors of type {', '.join(sorted(unread))}, converted are {readable_types()}")
    names = _target_names(source)
    differing = sorted((names.keys() ^ source.tensors.keys()) - {_OUTPUT_TENSOR})
    if differing:
        raise GgufError(f"{source.path.name} is no plain Llama: missing or unknown are the tensors {', '.join(differing)}")
    rows, tokens = source.tensors[_EMBEDDING_TENSOR].shape[0], len(source.texts("tokenizer.ggml.tokens"))
    if rows != tokens:
        raise GgufError(f"{source.path.name} has {tokens} tokens but embeddings of {rows}")


def _target_names(source: GgufFile) -> dict[str, str]:
    """The Hugging Face name of every tensor that a plain Llama of that many layers has in GGUF."""
    layers = range(source.integer("llama.block_count"))
    return _OUTER_TENSORS | {
        f"blk.{layer}.{name}.weight": f"model.layers.{layer}.{target}.weight"
        for layer in layers
        for name, target in _LAYER_TENSORS.items()
    }


def _config(source: GgufFile, shape: LlamaShape) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": _OUTPUT_TENSOR not in source.tensors,
        **_special_token_ids(source),
    }


def _special_token_ids(source: GgufFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    present = {name: f"tokenizer.ggml.{key}" for name, key in keys.items() if f"tokenizer.ggml.{key}" in source.metadata}
    return {name: source.integer(key) for name, key in present.items()}


def _tokenizer_config(source: GgufFile, shape: LlamaShape) -> Json:
    tokens = source.texts("tokenizer.ggml.tokens")
    special = {name.removesuffix("_id"): tokens[token_id] for name, token_id in _special_token_ids(source).items()}
    template = source.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_context,
        "clean_up_tokenization_spaces": False,
        **special,
        **({} if template is None else {"chat_template": template}),
    }


def _write_tensors(source: GgufFile, shape: LlamaShape, path: Path, advance: Advance) -> None:
    """Stream the tensors into one safetensors file, one in memory at a time."""
    header, total = _safetensors_header(source)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for info in source.tensors.values():
            written += file.write(_tensor(source, shape, info).astype("<f4", copy=False).data)
            advance(written, total)


def _safetensors_header(source: GgufFile) -> tuple[bytes, int]:
    """The start of the file, and how many bytes of numbers follow (format: github.com/huggingface/safetensors)."""
    names = _target_names(source)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for info in source.tensors.values():
        end = position + info.num_elements * _FLOAT32_BYTES
        entries[names[info.name]] = {"dtype": "F32", "shape": info.shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded, position


def _tensor(source: GgufFile, shape: LlamaShape, info: TensorInfo) -> NDArray[np.float32]:
    """The tensor in the order of rows that Hugging Face uses: query and key rows are interleaved in GGUF."""
    weights = source.read(info.name)
    if info.name.endswith("attn_q.weight"):
        return _halves_apart(weights, shape.num_heads)
    if info.name.endswith("attn_k.weight"):
        return _halves_apart(weights, shape.num_key_value_heads)
    return weights


def _halves_apart(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rotary pairs from neighbouring rows (2i, 2i + 1) of each head to rows (i, i + head_size / 2)."""
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
