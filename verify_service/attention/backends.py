"""This file is which attention the buckets of static buffers get, and why one that was asked for cannot be had."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from treewire.kv.store import KvStore
from verify_service.attention.bucket import BucketShape, Heads, MakeAttention, SdpaAttention
from verify_service.engine import Unsupported

AttentionKind = Literal["auto", "sdpa", "triton", "flashinfer"]
"""What computes attention on static buffers; auto is sdpa, PyTorch's own: the others have not been run on a GPU yet."""

_FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
_FLASHINFER_HEAD_SIZES = (64, 128, 256)


class AttentionPlace(NamedTuple):
    """Where attention is computed, on what: this rank's heads."""

    device: torch.device
    dtype: torch.dtype
    heads: Heads


def check_attention(kind: AttentionKind, place: AttentionPlace) -> None:
    """Raises Unsupported, with the reason, if this attention cannot be had there."""
    if kind == "triton":
        _check_triton(place)
    if kind == "flashinfer":
        _check_flashinfer(place)


def _check_triton(place: AttentionPlace) -> None:
    if find_spec("triton") is None:
        raise Unsupported("attention is triton, the package triton is not installed")
    from verify_service.attention.triton_attention import is_interpreted

    if place.device.type != "cuda" and not is_interpreted():
        raise Unsupported(f"attention is triton, which runs on CUDA, the device is {place.device}; elsewhere it is interpreted")


def _check_flashinfer(place: AttentionPlace) -> None:
    if place.device.type != "cuda":
        raise Unsupported(f"attention is flashinfer, which runs on CUDA, the device is {place.device}")
    if find_spec("flashinfer") is None:
        raise Unsupported("attention is flashinfer, the package flashinfer is not installed")
    if place.dtype not in _FLASHINFER_DTYPES:
        raise Unsupported(f"attention is flashinfer, which computes float16 and bfloat16, the type is {place.dtype}")
    if place.heads.size not in _FLASHINFER_HEAD_SIZES:
        sizes = ", ".join(map(str, _FLASHINFER_HEAD_SIZES))
        raise Unsupported(f"attention is flashinfer, which computes heads of {sizes}, this model's are of {place.heads.size}")


def make_attention(
    kind: AttentionKind, place: AttentionPlace, store: KvStore, page_size: int, largest: BucketShape
) -> MakeAttention:
    """What makes the attention of buckets up to the largest over a store whose last page is handed out to nobody.

    Raises Unsupported, with the reason, if it cannot be had.
    """
    check_attention(kind, place)
    if kind == "triton":
        from verify_service.attention.triton_attention import TritonAttention

        return lambda shape: TritonAttention(shape, store, page_size)
    if kind == "flashinfer":
        from verify_service.attention.flashinfer_attention import FlashInferBuckets, Paging, workspace_bytes

        num_processors = torch.cuda.get_device_properties(place.device).multi_processor_count
        num_bytes = workspace_bytes(place.heads, largest.num_sessions, largest.num_nodes, num_processors)
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
        return FlashInferBuckets(Paging(store, page_size, workspace), place.heads, place.dtype, largest.context)
    return lambda shape: SdpaAttention(store, place.dtype)
