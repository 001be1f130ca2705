"""This file is the cost of the pure core on this machine: build, noise, visibility and acceptance, in milliseconds.

python -m benchmarks.micro.core [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from treewire.core.acceptance import Acceptance, accept
from treewire.core.build import build_tree, perturb
from treewire.core.noise import noise_row
from treewire.core.tree import DraftTree, Marginals
from treewire.core.visibility import visibility

HORIZON = 15
WIDTH = 32
DRAFTER_VOCABULARY_SIZE = 5_000
NOISE_VOCABULARY_SIZE = 49_152
BUDGETS = (16, 64, 256, 512)
SPREAD = 6.0  # standard deviation of the logits; the best token then has probability 0.64 on average
SEED = 0
NUM_REPEATS = 200


@dataclass(frozen=True)
class Timing:
    """One operation's milliseconds over many repeats."""

    operation: str
    median_ms: float
    p99_ms: float
    min_ms: float


def main() -> None:
    """Measure everything once and show it."""
    arguments = _arguments()
    measured = list(timings())
    report = {**provenance(), "setting": _setting(), "timings": [asdict(timing) for timing in measured]}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(_table(measured))


def timings() -> Iterator[Timing]:
    """Every operation of a round's core work."""
    marginals = _marginals()
    branch_scores = perturb(marginals, SEED, 0)
    for budget in BUDGETS:
        tree = build_tree(0, marginals, budget).tree
        posterior = _agreeing(tree)
        yield _timed(f"build, budget {budget}", partial(build_tree, 0, marginals, budget))
        with_branch_scores = partial(build_tree, 0, marginals, budget, branch_scores=branch_scores)
        yield _timed(f"build with branch scores, budget {budget}", with_branch_scores)
        yield _timed(f"visibility, budget {budget}", partial(visibility, tree.parents))
        yield _timed(f"accept, budget {budget}", partial(_accept_afresh, tree, posterior))
    yield _timed("branch scores", partial(perturb, marginals, SEED, 0))
    yield _timed(f"noise row, vocabulary {NOISE_VOCABULARY_SIZE}", partial(noise_row, SEED, 0, NOISE_VOCABULARY_SIZE))


def _marginals() -> Marginals:
    logits = np.random.default_rng(SEED).normal(size=(HORIZON, DRAFTER_VOCABULARY_SIZE)) * SPREAD
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    token_ids = np.argsort(-log_probs, axis=1)[:, :WIDTH].astype(np.int32)
    return Marginals(token_ids, np.take_along_axis(log_probs, token_ids, 1).astype(np.float32))


def _agreeing(tree: DraftTree) -> list[int]:
    """A posterior that follows first children, the longest walk that such a tree has on its spine."""
    return [tree.token_ids[children[0]] if children else 0 for children in tree.children]


def _accept_afresh(tree: DraftTree, posterior: Sequence[int]) -> Acceptance:
    """The walk over a tree as it arrives from the wire, nothing derived from it yet."""
    return accept(DraftTree(tree.token_ids, tree.parents), posterior)


def _timed(operation: str, call: Callable[[], object]) -> Timing:
    milliseconds = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        call()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    p99 = statistics.quantiles(milliseconds, n=100)[-1]
    return Timing(operation, *(round(value, 4) for value in (statistics.median(milliseconds), p99, min(milliseconds))))


def _setting() -> dict[str, float]:
    return {
        "horizon": HORIZON,
        "width": WIDTH,
        "logit_spread": SPREAD,
        "drafter_vocabulary_size": DRAFTER_VOCABULARY_SIZE,
        "repeats": NUM_REPEATS,
    }


def _table(measured: Sequence[Timing]) -> Table:
    table = Table("operation", title=f"core, {HORIZON} depths of width {WIDTH}")
    for name in ("median ms", "p99 ms", "min ms"):
        table.add_column(name, justify="right")
    for timing in measured:
        table.add_row(timing.operation, *(f"{value:.3f}" for value in (timing.median_ms, timing.p99_ms, timing.min_ms)))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of the pure core on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
