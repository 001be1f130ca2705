"""Our Triton kernel, interpreted on this CPU: attention over random trees in pages is the reference's, and serves a target.

It has nothing to do with SGLang: this environment is the one that has Triton.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
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

ROOT = Path(__file__).resolve().parents[2]
NUM_COMPILED = 4
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # Triton's interpreter does not multiply bfloat16


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), RATIOS)
def test_it_is_attention_over_the_tree(num_heads: int, num_kv_heads: int, page_size: int) -> None:
    """Random trees over random pages, buckets filled to the brim, in part and not at all, among memory that is NaN."""
    rng = random.Random(page_size)
    for shape, dtype in ((BucketShape(1, 1, 16), torch.float16), (BucketShape(3, 17, 48), torch.float32)):
        heads = Heads(num_heads, num_kv_heads, rng.choice([16, 24, 64]))
        case = Case.random(rng, shape, heads, page_size, dtype)
        assert case.largest_difference(TritonAttention(shape, case.store, page_size)) < TOLERANCES[dtype]


def test_a_long_context_is_split_and_put_together() -> None:
    """Contexts that several programs share, some of which have nothing of it, give what one program gives."""
    rng, heads = random.Random(4), Heads(4, 2, 16)
    shape = BucketShape(2, 8, 1024)
    assert splits_of(shape.context, shape.num_sessions * heads.num_kv_heads) > 1
    case = Case.random(rng, shape, heads, 16)
    short = replace(Case.random(rng, shape._replace(context=16), heads, 16), shape=shape)
    place = AttentionPlace(torch.device("cpu"), torch.float32, heads)
    for own in (case, short):
        attention = make_attention("triton", place, own.store, 16, shape)(shape)
        assert own.largest_difference(attention) < TOLERANCES[torch.float32]


def test_it_compiles_for_gpus() -> None:
    """Both kernels, with and without splits, to machine code for an A100 and an H100, which the interpreter says nothing of."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.sglang.compiled_kernels"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == NUM_COMPILED


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
