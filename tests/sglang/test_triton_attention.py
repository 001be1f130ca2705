"""Our Triton kernel, interpreted on this CPU: attention over random trees in pages is the reference's, and serves a target.

It has nothing to do with SGLang: this environment is the one that has Triton.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.attention_cases import RATIOS, Case
from tests.engines.target_contract import GREEDY, continuation
from tests.engines.tiny_models import save_tiny_model
from treewire.core.sampling import Sampling
from verify_service.attention.backends import AttentionPlace, make_attention
from verify_service.attention.bucket import BucketShape, Heads
from verify_service.attention.triton_attention import TritonAttention, splits_of
from verify_service.engines.transformers import TransformersTarget

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # Triton's interpreter does not multiply bfloat16


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), RATIOS)
def test_it_is_attention_over_the_tree(num_heads: int, num_kv_heads: int, page_size: int) -> None:
    """Random trees over random pages, buckets filled to the brim, in part and not at all, among memory that is NaN."""
    rng = random.Random(page_size)
    for shape in (BucketShape(1, 1, 16), BucketShape(1, 8, 16), BucketShape(3, 17, 48), BucketShape(2, 33, 80)):
        for dtype, tolerance in TOLERANCES.items():
            heads = Heads(num_heads, num_kv_heads, rng.choice([16, 24, 64]))
            case = Case.random(rng, shape, heads, page_size, dtype)
            assert case.largest_difference(TritonAttention(shape, case.store, page_size)) < tolerance


def test_a_long_context_is_split_and_put_together() -> None:
    """Contexts that several programs share, some of which have nothing of it, give what one program gives."""
    rng, heads = random.Random(4), Heads(4, 2, 16)
    for shape in (BucketShape(1, 1, 1024), BucketShape(2, 8, 2048)):
        assert splits_of(shape.context, shape.num_sessions * heads.num_kv_heads) > 1
        case = Case.random(rng, shape, heads, 16)
        assert case.largest_difference(TritonAttention(shape, case.store, 16)) < TOLERANCES[torch.float32]
        short = Case.random(rng, shape._replace(context=16), heads, 16)
        place = AttentionPlace(torch.device("cpu"), torch.float32, heads)
        attention = make_attention("triton", place, short.store, 16, shape)(shape)
        assert _widened(short, shape).largest_difference(attention) < TOLERANCES[torch.float32]


def _widened(case: Case, shape: BucketShape) -> Case:
    """The same sessions in a bucket of longer contexts."""
    return Case(shape, case.sessions, case.store, case.heads, case.page_size, case.query, case.key, case.value)


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_target_on_it_says_what_it_says_on_ragged_rows(tmp_path: Path, page_size: int) -> None:
    """Greedy and seeded text of a tiny model, trees in buckets through the kernel."""
    folder = save_tiny_model(tmp_path, "qwen3", head_dim=16)
    sizes = {"max_tree_nodes": 9, "max_context": 96, "kv_tokens": 256, "kv_page_size": page_size}
    engines = [
        TransformersTarget.load(folder, graphs="on", attention="triton", **sizes),
        TransformersTarget.load(folder, graphs="off", **sizes),
    ]
    for number, sampling in enumerate((GREEDY, Sampling(temperature=1.1, seed=8))):
        texts = [continuation(engine, number, [3, 1, 4, 1, 5], 6, sampling) for engine in engines]
        assert texts[0] == texts[1]
