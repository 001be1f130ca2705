"""This file is which forward a model gets: the lean one where its architecture is known, transformers' modules otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from treewire.checkpoint import FeatureProjection
from treewire.int8 import has_kernel
from treewire.kv.store import KvStore
from verify_service.attention.layout import StepLayout
from verify_service.attention.tree_attention import TreeAttention, double_core, fused_core
from verify_service.engine import Unsupported
from verify_service.engines.features import Computed, FeatureTaps
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.checkpoint import Checkpoint
from verify_service.engines.transformers.lean import PRECISIONS, LeanForward

ForwardKind = Literal["auto", "lean", "transformers"]
_INT8 = "int8"


class Forward(Protocol):
    """A model over a KV store of ours."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    @property
    def store(self) -> KvStore:
        """Its keys and values."""

    @property
    def has_taps(self) -> bool:
        """Whether it makes features."""

    def logits(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor) -> Tensor:
        """Run tokens int64 [rows] as laid out; float32 [wanted, vocabulary] of the rows numbered in `wanted` int64."""

    def compute(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor, tapped: Tensor) -> Computed:
        """The same, with the features of the rows numbered in `tapped` int64; for a model loaded with a projection."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A forward, and what the model's files say of it."""

    forward: Forward
    vocabulary_size: int
    max_context: int
    tokenizer_hash: str
    end_token_ids: tuple[int, ...]
    projection: FeatureProjection | None


def load_model(
    model: str | Path,
    *,
    kind: ForwardKind,
    device: str,
    dtype: str,
    max_context: int | None,
    kv_slots: int,
    feature_projection: Path | None = None,
) -> LoadedModel:
    """Load a model from a directory, a hub id or a GGUF file. `auto` takes the lean forward if it computes this model.

    Raises Unsupported with the reason for a model that cannot be served so, ValueError for a wrong dtype or context.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype is {dtype}, it must be one of {', '.join(PRECISIONS)}")
    try:
        if kind == "transformers":
            raise Unsupported("the forward of transformers was asked for")
        return _lean(Path(model), device, dtype, max_context, kv_slots, feature_projection)
    except Unsupported as error:
        if kind == "lean":
            raise
        if dtype == _INT8:
            raise Unsupported(f"int8 is computed by the lean forward alone: {error}") from error
    return _general(model, device, dtype, max_context, kv_slots, feature_projection)


def _lean(
    directory: Path, device: str, dtype: str, max_context: int | None, kv_slots: int, feature_projection: Path | None
) -> LoadedModel:
    if not Checkpoint.is_one(directory):
        raise Unsupported(f"{directory} is no directory with config.json and safetensors")
    checkpoint = Checkpoint(directory)
    architecture = Architecture.from_config(checkpoint.config)
    if dtype == _INT8 and torch.device(device).type != "cpu":
        raise Unsupported(f"int8 is computed on CPUs, not on {device}")
    if dtype == _INT8 and not has_kernel():
        raise Unsupported("int8 needs PyTorch's fbgemm kernels, which there are on x86 CPUs only")
    longest = longest_context([architecture.max_context], max_context)
    attention = TreeAttention(KvStore(kv_slots), double_core if dtype == _INT8 else fused_core)
    taps = _taps(feature_projection, architecture.num_layers, architecture.hidden_size, torch.device(device))
    forward = LeanForward(architecture, checkpoint, PRECISIONS[dtype], attention, device, taps)
    return LoadedModel(
        forward,
        architecture.vocabulary_size,
        longest,
        checkpoint.tokenizer_hash,
        checkpoint.end_token_ids,
        taps.projection if taps else None,
    )


def _general(
    model: str | Path, device: str, dtype: str, max_context: int | None, kv_slots: int, feature_projection: Path | None
) -> LoadedModel:
    """Any model of transformers, probed. The import costs seconds and 150 MB, which the lean forward saves."""
    from verify_service.engines.transformers import loading
    from verify_service.engines.transformers.forward import TreeForward
    from verify_service.engines.transformers.probe import probe

    config = loading.load_config(model)
    longest = longest_context(loading.context_limits(config), max_context)
    loaded = loading.load_model(model, device, dtype)
    store = probe(loaded).resized(kv_slots)
    taps = _taps(feature_projection, config.num_hidden_layers, config.hidden_size, loaded.device)
    return LoadedModel(
        TreeForward(loaded, store, taps),
        config.vocab_size,
        longest,
        loading.tokenizer_hash_of(model),
        loading.end_token_ids_of(loaded),
        taps.projection if taps else None,
    )


def _taps(checkpoint: Path | None, num_layers: int, hidden_size: int, device: torch.device) -> FeatureTaps | None:
    if checkpoint is None:
        return None
    return FeatureTaps.load(checkpoint, num_layers=num_layers, hidden_size=hidden_size, device=device)


def longest_context(made_for: Sequence[int], asked: int | None) -> int:
    """Longest sequence in tokens: what the model was made for, or less if asked for."""
    limits = [*made_for, *([] if asked is None else [asked])]
    if not limits:
        raise ValueError("the model does not say how long its context is; give max_context")
    if min(limits) < 1:
        raise ValueError(f"max_context is {min(limits)}, it must be at least 1")
    return min(limits)
