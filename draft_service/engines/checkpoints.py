"""This file is how a checkpoint of a feature drafter becomes an engine: which network it is, and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_service.engine import KV_PAGE_SIZE, KV_TOKENS, Drafter
from draft_service.engines.feature_drafter import FeatureDrafter
from draft_service.engines.target_tensors import TargetTensors, load_target_tensors, load_tensors
from treewire.checkpoint import DFLASH, architecture_of, feature_projection, read_branch_weights, read_config
from treewire.core.build import BranchWeights
from treewire.kv.pages import PagedKv
from treewire.kv.store import KvStore
from treewire.vocabulary import load_tokenizer, vocabulary_hash

AUTO, INT8 = "auto", "int8"
RECURRENT_BEAM = 4  # unless told otherwise; docs/drafters.md has what others gain
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, INT8: torch.float32}


def load_feature_drafter(
    checkpoint: Path,
    target: Path,
    *,
    name: str = "",
    device: str = "cpu",
    dtype: str = "float32",
    horizon: int = 64,
    width: int = 64,
    beam: int | None = None,
    num_threads: int | None = None,
    weights: BranchWeights | None = None,
    kv_tokens: int = KV_TOKENS,
    kv_page_size: int = KV_PAGE_SIZE,
) -> FeatureDrafter:
    """The drafter of a checkpoint, DFlash or recurrent, for the target whose directory is `target`.

    `name` is what people read; `horizon` and `width` are cut to what the drafter has; `num_threads` is of the whole process.
    `dtype` "int8", for recurrent drafters, rounds their matrices; "auto" is that for them, and float32 for block drafters.
    `beam` is how many prefixes a recurrent drafter describes at each depth, None its default; block drafters take 1 alone.
    `weights` rank branches, in the place of those beside the checkpoint.
    `kv_tokens` positions' keys and values fit in all sessions together, in pages of `kv_page_size`.
    Raises ValueError, with the reason, for a checkpoint that this engine does not run or that does not fit the target.
    """
    kv = PagedKv(kv_tokens, kv_page_size)
    store = KvStore(kv.num_slots)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    config, projection = read_config(checkpoint), feature_projection(checkpoint)
    is_block = architecture_of(config) == DFLASH
    dtype = _resolved(dtype, device, is_block=is_block)
    shared = load_target_tensors(target, device=device, dtype=_DTYPES[dtype])
    vocabulary_size, hidden_size = shared.embedding.shape
    if hidden_size != projection.feature_size:
        raise ValueError(f"the drafter has hidden size {projection.feature_size}, its target's embedding has {hidden_size}")
    tensors = load_tensors(checkpoint, device=device, dtype=_DTYPES[dtype])
    beam = _beam(beam, is_block=is_block)
    if is_block:
        network, own_horizon = _block_network(config, tensors, shared, store)
    else:
        network, own_horizon = _recurrent_network(config, tensors, shared, store, in_int8=dtype == INT8, beam=beam)
    drafter = Drafter(
        engine="dflash" if is_block else "recurrent",
        model=name or checkpoint.name,
        vocabulary_size=vocabulary_size,
        tokenizer_hash=_tokenizer_hash(target),
        horizon=min(horizon, own_horizon),
        width=min(width, vocabulary_size),
        max_context=min(shared.max_context, config.get("max_position_embeddings") or shared.max_context),
        needs_features=True,
        feature_size=projection.feature_size,
        tapped_layers=projection.tapped_layers,
        feature_projection_hash=projection.hash,
        max_prefixes=(beam - 1) * (min(horizon, own_horizon) - 1),
        weights=weights or read_branch_weights(checkpoint),
    )
    return FeatureDrafter(network, drafter, kv)


def _resolved(dtype: str, device: str, *, is_block: bool) -> str:
    """The type in which weights are kept. Raises ValueError for one, or a device, that this drafter does not take."""
    taken = ("float32", "bfloat16", "float16") if is_block else ("float32", INT8)
    if dtype not in (AUTO, *taken):
        raise ValueError(f"dtype is {dtype!r}, this drafter takes {', '.join((AUTO, *taken))}")
    if not is_block and device != "cpu":
        raise ValueError(f"device is {device!r}, recurrent drafters run on a CPU")
    if dtype == AUTO:
        return "float32" if is_block else INT8
    return dtype


def _beam(beam: int | None, *, is_block: bool) -> int:
    """Prefixes described at each depth. Raises ValueError for more than one of a drafter that describes depths alone."""
    if is_block:
        if beam not in (None, 1):
            raise ValueError(f"beam is {beam}, a block drafter guesses every depth at once, whatever token is chosen before it")
        return 1
    if beam is not None and beam < 1:
        raise ValueError(f"beam is {beam}, it must be at least 1")
    return RECURRENT_BEAM if beam is None else beam


def _block_network(config: Any, tensors: dict[str, Tensor], shared: TargetTensors, store: KvStore) -> tuple[Any, int]:
    from draft_service.engines.dflash.model import DFlashConfig, DFlashDrafter
    from draft_service.engines.dflash.network import BlockNetwork

    shape = DFlashConfig.from_json(config)
    if not 0 <= shape.mask_token_id < len(shared.embedding):
        raise ValueError(f"mask token is {shape.mask_token_id}, the target has tokens up to {len(shared.embedding) - 1}")
    with torch.device("meta"):
        model = DFlashDrafter(shape, shared.embedding, shared.head)
    return BlockNetwork(_filled(model, tensors), store), shape.horizon


def _recurrent_network(
    config: Any, tensors: dict[str, Tensor], shared: TargetTensors, store: KvStore, *, in_int8: bool, beam: int
) -> tuple[Any, int]:
    from draft_service.engines.recurrent.model import RecurrentConfig, RecurrentDrafter
    from draft_service.engines.recurrent.network import RecurrentNetwork

    shape = RecurrentConfig.from_json(config)
    tensors["candidate_ids"] = tensors["candidate_ids"].long()
    model = RecurrentDrafter(shape, shared.embedding, shared.head, tensors["candidate_ids"])
    filled = _filled(model, tensors)
    return RecurrentNetwork(filled.for_drafting() if in_int8 else filled, store, beam=beam), shape.horizon


def _filled(model: Any, tensors: dict[str, Tensor]) -> Any:
    """The model with these weights. Raises ValueError unless they are exactly the model's."""
    expected, given = set(model.state_dict()), set(tensors)
    if expected != given:
        missing, unknown = sorted(expected - given), sorted(given - expected)
        raise ValueError(f"the checkpoint lacks the tensors {missing} and has unknown ones {unknown}")
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not have the shape that its config says: {error}") from error
    return model.requires_grad_(False).eval()


def _tokenizer_hash(target: Path) -> str:
    return vocabulary_hash(load_tokenizer(target)) if (target / "tokenizer.json").is_file() else ""
