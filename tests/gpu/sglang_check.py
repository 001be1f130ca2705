"""SGLang on this machine's GPU: trees of a tiny random model in CUDA graphs and out of them, against transformers.

`python -m tests.gpu.sglang_check [--device cpu]` prints a line for each case and exits with 1 if one fails. Without SGLang or
without a GPU it says so, checks nothing and exits with 0.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engines.target_contract import prefill, random_tree
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.core.tree import DraftTree
from verify_service.engine import Scoring, Unsupported
from verify_service.engines.sglang import SglangOptions, SglangTarget, StartedSglang
from verify_service.engines.sglang.release import check_version

_WIDTHS = (17, 65)
_BATCH_SIZES = (1, 4)
_TOLERANCE = 2e-2  # of a log-prob: kernels of a GPU sum in another order, some in TF32
_PROMPT_LENGTH = 40


@dataclass(frozen=True)
class Case:
    """One way to run the target. `captured` if trees are to run in CUDA graphs."""

    backend: str
    captured: bool


def cases(device: str) -> Iterator[Case]:
    """What is tried: every backend that takes a tree, eager and captured; on a CPU only what there is."""
    for backend in ("triton", "flashinfer", "fa3") if device == "cuda" else ("triton",):
        for captured in (True, False) if device == "cuda" else (False,):
            yield Case(backend, captured)


def worst_difference(engine: SglangTarget, reference: Callable[[Sequence[int]], list[float]]) -> float:
    """The largest difference of a log-prob, over batches of trees of every width, from that of the node's path alone."""
    rng, worst = random.Random(1), 0.0
    for batch_size in _BATCH_SIZES:
        for width in _WIDTHS:
            prompts = [[rng.randrange(VOCABULARY_SIZE) for _ in range(_PROMPT_LENGTH)] for _ in range(batch_size)]
            trees = []
            for session, prompt in enumerate(prompts):
                root = prefill(engine, session, prompt, num_node_probabilities=VOCABULARY_SIZE).token_ids[-1]
                trees.append(random_tree(rng, root, VOCABULARY_SIZE, width - rng.randrange(3)))
            posteriors = engine.step([Scoring(session, tree) for session, tree in enumerate(trees)])
            for session, (prompt, tree, posterior) in enumerate(zip(prompts, trees, posteriors, strict=True)):
                for node in rng.sample(range(len(tree)), 6):
                    expected = reference([*prompt, *_path_tokens(tree, node)])
                    likely = posterior.node_probabilities[node]
                    found = zip(likely.token_ids, likely.log_probs, strict=True)
                    worst = max(worst, *(abs(expected[token_id] - log_prob) for token_id, log_prob in found))
                engine.release(session)
    return worst


def _path_tokens(tree: DraftTree, node: int) -> list[int]:
    return [tree.token_ids[step] for step in tree.path(node)]


def _reference(folder: Path) -> Callable[[Sequence[int]], list[float]]:
    """transformers on the CPU: log-probs after a text."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def log_probs(token_ids: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            values: list[float] = model(torch.tensor([list(token_ids)])).logits[0, -1].log_softmax(-1).tolist()
            return values

    return log_probs


def run(case: Case, folder: Path, device: str) -> str:
    """What came of it: "ok" or "FAILED", and why."""
    options = SglangOptions(
        folder,
        device=device,
        attention_backend=case.backend,
        max_total_tokens=4096,
        mem_fraction_static=0.5,
        max_sessions=4,
        max_tree_nodes=_WIDTHS[-1],
        tree_widths=_WIDTHS,
        sglang_args={} if case.captured or device == "cpu" else {"disable_decode_cuda_graph": True},
    )
    started = StartedSglang(options, str(folder))
    try:
        engine = started.load()
        worst = worst_difference(engine, _reference(folder))
        if case.captured and engine.num_missed_graphs:
            return f"FAILED: {engine.num_missed_graphs} steps ran outside the graphs"
        return f"{'ok' if worst <= _TOLERANCE else 'FAILED'}: log-probs differ by at most {worst:.2g}"
    except Exception as error:  # noqa: BLE001 - a backend that this GPU has not is a result, not the end
        return f"FAILED: {type(error).__name__}: {error}"
    finally:
        started.stop()


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    try:
        check_version()
    except Unsupported as error:
        print(f"SGLang was NOT checked: {error}")
        return 0
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("SGLang was NOT checked: there is no GPU here")
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), "llama", head_dim=64, hidden_size=256)
        for case in cases(device):
            outcome = run(case, path, device)
            failed |= not outcome.startswith("ok")
            print(f"{case.backend:10} {'graphs' if case.captured else 'eager':7} {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
