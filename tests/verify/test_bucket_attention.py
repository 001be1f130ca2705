"""Attention over buckets: PyTorch's, and what FlashInfer is told, are the reference's; what cannot be had is refused."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention_cases import RATIOS, Case
from tests.engines.tiny_models import save_tiny_model
from tests.verify import flashinfer_stand_in
from verify_service.attention.backends import AttentionPlace, check_attention
from verify_service.attention.bucket import BucketShape, Heads, SdpaAttention
from verify_service.attention.paged_plan import packed_mask, paged_plan
from verify_service.engine import Unsupported
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.tensor_parallel import StartedTransformers, TensorParallelOptions
from verify_service.settings import VerifySettings

SHAPES = (BucketShape(1, 1, 16), BucketShape(1, 8, 16), BucketShape(3, 17, 48), BucketShape(2, 33, 80))
TOLERANCE = 1e-5
CUDA = AttentionPlace(torch.device("cuda"), torch.bfloat16, Heads(16, 8, 128))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our side of FlashInfer, over a stand-in that reads its buffers in plain loops."""
    stand_in: Any = ModuleType("flashinfer")
    stand_in.BatchPrefillWithPagedKVCacheWrapper = flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    name = "verify_service.attention.flashinfer_attention"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), RATIOS)
def test_pytorchs_attention_is_the_reference(num_heads: int, num_kv_heads: int, page_size: int) -> None:
    """Random trees over random pages, with what fills the buckets, and NaN in memory that is nobody's."""
    rng = random.Random(page_size)
    for shape in SHAPES:
        case = Case.random(rng, shape, Heads(num_heads, num_kv_heads, 16), page_size)
        assert case.largest_difference(SdpaAttention(case.store, torch.float32)) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_what_flashinfer_is_told_is_the_reference(flashinfer: Any, page_size: int) -> None:
    """Page tables, row starts and mask, read as FlashInfer reads them, give the reference; buckets of one size share them."""
    rng, heads = random.Random(page_size), Heads(4, 2, 16)
    for shape in SHAPES:
        case = Case.random(rng, shape, heads, page_size)
        paging = flashinfer.Paging(case.store, page_size, torch.zeros(8, dtype=torch.uint8))
        make = flashinfer.FlashInferBuckets(paging, heads, torch.float32, max_context=4 * shape.context)
        longer = make(shape._replace(context=2 * shape.context))
        longer.plan([])
        assert case.largest_difference(make(shape)) < TOLERANCE


def test_plans_are_those_of_the_pages() -> None:
    """Rows of a bucket, pages in order, how far the last one is filled, and the spare page for what fills the bucket."""
    slots = [np.array([16, 17, 18, 19, 4, 5]), np.array([8, 9, 10, 11])]
    plan = paged_plan(slots, BucketShape(3, 2, 8), 4, 9)
    assert plan.row_starts.tolist() == [0, 2, 4, 6]
    assert plan.page_starts.tolist() == [0, 2, 3, 4]
    assert plan.pages.tolist() == [4, 1, 2, 9]
    assert plan.last_page_lengths.tolist() == [2, 4, 1]


def test_masks_are_the_packed_matrix_of_what_is_seen() -> None:
    """Bit by bit what numpy packs of the whole matrix; the 32nd bit of a word as any other."""
    rng = random.Random(2)
    for shape in SHAPES:
        case = Case.random(rng, shape, Heads(1, 1, 8), 1)
        rows = case.rows
        found = packed_mask(rows, shape).numpy().view(np.uint8)
        for number, (tree, _) in enumerate(case.sessions):
            length, count = case.sessions[number].length, len(tree)
            seen = np.ones((shape.num_nodes, length + count), np.bool_)
            seen[:, length:] = rows.visible[number, :, :count].numpy()
            packed = np.packbits(seen.reshape(-1), bitorder="little")
            whole, rest = divmod(seen.size, 8)
            np.testing.assert_array_equal(found[number, :whole], packed[:whole])
            assert not rest or (found[number, whole] ^ packed[whole]) % (1 << rest) == 0


def test_the_workspace_holds_what_is_counted(flashinfer: Any) -> None:
    """At least float32 of every query head, row and column and a sum, of the rows themselves and of one wave of blocks."""
    heads = Heads(32, 8, 128)
    assert flashinfer.workspace_bytes(heads, 1, 1, 132) >= 32 * (2 * 132 // 8) * 128 * 129 * 4
    assert flashinfer.workspace_bytes(heads, 8, 513, 132) >= 32 * (8 * 513 * 4 // 128 + 8) * 128 * 129 * 4


@pytest.mark.parametrize(
    ("kind", "place", "reason"),
    [
        ("flashinfer", CUDA._replace(device=torch.device("cpu")), "flashinfer, which runs on CUDA, the device is cpu"),
        ("flashinfer", CUDA, "the package flashinfer is not installed"),
        ("triton", CUDA, "the package triton is not installed"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, kind: Any, place: AttentionPlace, reason: str) -> None:
    """With the reason."""
    monkeypatch.setattr("verify_service.attention.backends.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=reason):
        check_attention(kind, place)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (CUDA._replace(dtype=torch.float32), "float16 and bfloat16, the type is torch.float32"),
        (CUDA._replace(heads=Heads(4, 2, 80)), "heads of 64, 128, 256, this model's are of 80"),
    ],
)
def test_what_flashinfer_does_not_compute_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: AttentionPlace, reason: str
) -> None:
    """Types and sizes of heads, by value."""
    monkeypatch.setattr("verify_service.attention.backends.find_spec", lambda name: object())
    with pytest.raises(Unsupported, match=reason):
        check_attention("flashinfer", place)
    check_attention("flashinfer", CUDA)


def test_it_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    """Attention for static buffers without any, on one rank and on two; on a device that it is not for."""
    folder = save_tiny_model(tmp_path, "llama")
    with pytest.raises(Unsupported, match="flashinfer, which is for trees on static buffers: set graphs to on"):
        TransformersTarget.load(folder, attention="flashinfer")
    with pytest.raises(Unsupported, match="flashinfer, which runs on CUDA, the device is cpu"):
        TransformersTarget.load(folder, attention="flashinfer", graphs="on")
    with pytest.raises(Unsupported, match="triton, which is for trees on static buffers: set graphs to on"):
        StartedTransformers(TensorParallelOptions(folder, tp_size=2, attention="triton"), "tiny")
    with pytest.raises(Unsupported, match="flashinfer, which runs on CUDA, the device is cpu"):
        StartedTransformers(TensorParallelOptions(folder, tp_size=2, attention="flashinfer", graphs="on"), "tiny")


def test_it_is_refused_where_there_are_no_static_buffers() -> None:
    """Other engines have attention of their own."""
    with pytest.raises(ValueError, match="attention is triton, it is for the transformers engine, this one is simulated"):
        VerifySettings(engine="simulated", attention="triton")
    assert VerifySettings(attention="flashinfer").attention == "flashinfer"
