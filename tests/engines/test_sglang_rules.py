"""The parts of the SGLang engine that need no SGLang: what is refused and why, what it is told, how trees are padded."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.target_contract import random_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import Unsupported
from verify_service.engines.sglang.batches import chain_batch, num_padding, table_writes, tree_batch, width_for
from verify_service.engines.sglang.messages import Part
from verify_service.engines.sglang.options import SglangOptions, server_arguments
from verify_service.engines.sglang.refusals import check, refusals
from verify_service.engines.sglang.traits import ModelTraits
from verify_service.settings import VerifySettings

ROOT = Path(__file__).resolve().parents[2]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}
KIMI = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "max_position_embeddings": 262144,
        "kv_lora_rank": 512,
    },
}


def options(**changes: Any) -> SglangOptions:
    """Options of one GPU."""
    return SglangOptions(Path("model"), **{"device": "cuda", "dtype": "bfloat16", **changes})


def reasons(config: dict[str, Any], **changes: Any) -> list[str]:
    """Why these options cannot serve this model."""
    return list(refusals(options(**changes), ModelTraits.of(config)))


@pytest.mark.parametrize("backend", ["triton", "fa3", "fa4"])
@pytest.mark.parametrize("config", [LLAMA, KIMI])
def test_backends_that_honour_a_tree_mask_are_taken(config: dict[str, Any], backend: str) -> None:
    """Triton and the two FlashAttentions, with and without latent attention."""
    assert reasons(config, attention_backend=backend) == []


@pytest.mark.parametrize(
    ("config", "backend", "reason"),
    [
        (KIMI, "flashinfer", "drops it and computes causal attention"),
        (KIMI, "trtllm_mla", "causal attention"),
        (KIMI, "flashmla", "causal attention"),
        (KIMI, "cutedsl_mla", "causal attention"),
        (LLAMA, "trtllm_mha", "chains only"),
        (LLAMA, "torch_native", "fails"),
        (LLAMA, "something_new", "not known to honour"),
    ],
)
def test_backends_that_ignore_a_tree_mask_are_refused(config: dict[str, Any], backend: str, reason: str) -> None:
    """The message has the backend, the reason, and what to take."""
    (said,) = reasons(config, attention_backend=backend)
    assert backend in said
    assert reason in said
    assert "take triton" in said


def test_flashinfer_is_taken_without_latent_attention() -> None:
    """It honours the mask there."""
    assert reasons(LLAMA, attention_backend="flashinfer") == []


@pytest.mark.parametrize("name", ["prefill_attention_backend", "decode_attention_backend"])
def test_a_backend_in_the_further_arguments_is_checked_too(name: str) -> None:
    """The JSON is no way around the rules."""
    (said,) = reasons(KIMI, sglang_args={name: "flashinfer"})
    assert "flashinfer cannot verify trees" in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent state (layers of type linear_attention)"),
        ({"mamba_d_state": 128}, "recurrent state (mamba_d_state)"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "sliding-window attention (layers of type sliding_attention)",
        ),
        ({"sliding_window": 4096}, "sliding-window attention (sliding_window 4096)"),
        ({"attention_chunk_size": 8192}, "sliding-window attention (attention_chunk_size 8192)"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"max_position_embeddings": None}, "give max_context"),
        ({"max_position_embeddings": 100}, "has only 100 positions"),
    ],
)
def test_models_that_trees_would_get_wrong_are_refused(changes: dict[str, Any], reason: str) -> None:
    """What shows it in the model's config is named."""
    (said,) = reasons({**LLAMA, **changes})
    assert reason in said


def test_a_window_that_is_off_is_none() -> None:
    """Qwen2 has a window in its config and does not use it."""
    assert reasons({**LLAMA, "sliding_window": 131072, "use_sliding_window": False}) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sglang_args": {"page_size": 64}}, "page_size is 64, this engine takes 1"),
        ({"sglang_args": {"dp_size": 2}}, "one verify service for each"),
        ({"sglang_args": {"pp_size": 4}}, "use tp_size"),
        ({"sglang_args": {"enable_dp_attention": True}}, "enable_dp_attention is on"),
        ({"tp_size": 8, "nnodes": 3, "dist_init_addr": "a:1"}, "a multiple of nnodes, 3"),
        ({"tp_size": 16, "nnodes": 2}, "dist_init_addr is not set"),
        ({"tp_size": 16, "nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, "the ranks are 0 to 1"),
        ({"max_context": 8192}, "max_context is 8,192, llama has 8,192 positions and the widest tree needs 129"),
        ({"tap_layers": (1, 31)}, "layer 31 is tapped, of llama the outputs of layers 0 to 30"),
        ({"tap_layers": (4, 1)}, "they must rise"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    """One sentence with the value and the limit."""
    (said,) = reasons(LLAMA, **changes)
    assert reason in said


def test_every_reason_is_told_at_once() -> None:
    """Who has three things wrong reads of three."""
    with pytest.raises(Unsupported, match=r"flashmla.*page_size.*max_context"):
        check(
            options(attention_backend="flashmla", sglang_args={"page_size": 2}, max_context=1 << 20),
            ModelTraits.of(KIMI),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_widths": ()}, "tree_widths"),
        ({"tree_widths": (17, 9)}, "must rise"),
        ({"tree_widths": (1, 9)}, "at least 2"),
        ({"tp_size": 0}, "tp_size is 0"),
        (
            {"sglang_args": {"tp_size": 2, "speculative_algorithm": "EAGLE"}},
            "speculative_algorithm, tp_size, which this engine",
        ),
    ],
)
def test_options_check_themselves(changes: dict[str, Any], message: str) -> None:
    """A value that can never be meant is not held."""
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_sglang_is_told_what_trees_need() -> None:
    """Page size 1, the widest tree beside the context, graphs of that width; further arguments as they are given."""
    chosen = options(tp_size=8, max_tree_nodes=60, mem_fraction_static=0.9, sglang_args={"moe_runner_backend": "triton"})
    arguments = server_arguments(chosen, ModelTraits.of(KIMI), 29500)
    assert chosen.widths == (9, 17, 33, 65)
    assert arguments["context_length"] == 262144
    assert chosen.context_of(ModelTraits.of(KIMI)) == 262144 - 65
    assert (arguments["page_size"], arguments["speculative_num_draft_tokens"], arguments["tp_size"]) == (1, 65, 8)
    assert (arguments["mem_fraction_static"], arguments["moe_runner_backend"]) == (0.9, "triton")
    assert arguments["cuda_graph_bs_decode"] == [1, 2, 4, 8, 12, 16]
    assert "quantization" not in arguments
    assert "disable_cuda_graph" not in arguments
    assert arguments["return_hidden_states_mode"] is None


def test_ranks_are_spread_over_nodes() -> None:
    """Each node has its share, in order."""
    second = options(tp_size=16, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:20000")
    assert list(second.local_ranks) == list(range(8, 16))


def part(tree: DraftTree | None, token_ids: tuple[int, ...], *, row: int, prefix_length: int, slots: tuple[int, ...]) -> Part:
    """A greedy part whose row is written from its prefix on."""
    written = prefix_length - (len(slots) - len(token_ids))
    return Part(row, prefix_length, written, slots, token_ids, tree, len(token_ids), Sampling(), 0)


def test_a_tree_is_padded_with_what_nobody_sees() -> None:
    """Real nodes see their ancestors alone; padding nodes see themselves, sit at the root's position, write to slot 0."""
    tree = DraftTree((10, 11, 12), (-1, 0, 0))
    batch = tree_batch([part(tree, tree.token_ids, row=2, prefix_length=7, slots=(21, 22, 23))], 5)
    assert batch.token_ids.tolist() == [10, 11, 12, 0, 0]
    assert batch.positions.tolist() == [7, 8, 8, 7, 7]
    assert batch.slots.tolist() == [21, 22, 23, 0, 0]
    assert batch.visible[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_random_trees_of_a_batch_do_not_touch_each_other() -> None:
    """Whatever the sizes: no real node sees padding, and each tree's block is that of the tree alone."""
    rng = random.Random(5)
    trees = [random_tree(rng, 1, 50, rng.randrange(1, 18)) for _ in range(6)]
    parts = [
        part(tree, tree.token_ids, row=number + 1, prefix_length=number, slots=tuple(range(100, 100 + len(tree))))
        for number, tree in enumerate(trees)
    ]
    batch = tree_batch(parts, 17)
    for number, tree in enumerate(trees):
        size = len(tree)
        assert not batch.visible[number, :size, size:].any()
        assert not batch.visible[number, size:, :size].any()
        alone = tree_batch([parts[number]], 17)
        assert np.array_equal(batch.visible[number], alone.visible[0])
    assert num_padding(parts, 17) == sum(17 - len(tree) for tree in trees)


def test_rows_get_what_was_kept_the_tree_and_padding() -> None:
    """The table's row continues behind what it has: slots of kept nodes, then the tree's, then the padding slot."""
    tree = DraftTree((10, 11), (-1, 0))
    chunk = part(None, (5, 6, 7), row=1, prefix_length=2, slots=(3, 4, 5))
    scored = part(tree, tree.token_ids, row=2, prefix_length=7, slots=(31, 32, 33, 34))
    writes = table_writes([chunk, scored], 4)
    assert list(zip(writes.rows.tolist(), writes.columns.tolist(), writes.slots.tolist(), strict=True)) == [
        *[(1, 2, 3), (1, 3, 4), (1, 4, 5)],
        *[(2, 5, 31), (2, 6, 32), (2, 7, 33), (2, 8, 34), (2, 9, 0), (2, 10, 0)],
    ]
    chain = chain_batch([chunk])
    assert (chain.positions.tolist(), chain.slots.tolist(), chain.lengths.tolist()) == ([2, 3, 4], [3, 4, 5], [3])


def test_the_next_width_is_taken() -> None:
    """A tree that fits exactly is not padded further; one that fits nowhere is refused."""
    assert [width_for((9, 17), size) for size in (1, 9, 10, 17)] == [9, 9, 17, 17]
    with pytest.raises(ValueError, match=r"18 nodes.*17"):
        width_for((9, 17), 18)


def test_settings_of_another_engine_are_refused() -> None:
    """A flag that only SGLang knows is not ignored elsewhere."""
    with pytest.raises(ValueError, match="tp_size is for the engines transformers and sglang, this one is simulated"):
        VerifySettings(engine="simulated", tp_size=2)
    with pytest.raises(ValueError, match="tree_widths is for the sglang engine"):
        VerifySettings(tree_widths=(9,))
    with pytest.raises(ValueError, match="not JSON"):
        VerifySettings(engine="sglang", sglang_args="{")
    assert VerifySettings(engine="sglang", sglang_args='{"a": [1]}').sglang_arguments == {"a": [1]}


def test_the_service_itself_imports_neither_torch_nor_sglang() -> None:
    """What is heavy is imported in the ranks' processes alone."""
    statement = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'sglang'], None)); "
        "import verify_service.__main__, verify_service.engines.sglang"
    )
    result = subprocess.run([sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
