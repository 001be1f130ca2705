"""This file is the cost of static buffers on this machine: the same trees on them, run eagerly, and as ragged rows.

python -m benchmarks.micro.static [--model NAME] [--threads N] [--rounds N] [--output FILE]

Both are measured in turns within one run, with contexts and trees that just fill their buckets; medians and their quotient.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads

from benchmarks.machine import provenance
from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.weights import DEFAULT_MODEL, resolve
from verify_service.engine import PrefillChunk, Scoring
from verify_service.engines.transformers import TransformersTarget

CONTEXT_TOKENS = 256
STEPS = ((1, 1), (8, 1), (17, 1), (33, 1), (17, 4))
"""Nodes and sessions."""


def opened(engine: TransformersTarget, num_sessions: int, num_tokens: int) -> None:
    """Sessions 0 to `num_sessions`, prefilled."""
    rng = random.Random(0)
    for session in range(num_sessions):
        prompt = tuple(rng.randrange(engine.target.vocabulary_size) for _ in range(num_tokens))
        num_known = engine.open(session, prompt, Sampling())
        engine.step([PrefillChunk(session, prompt[num_known:], last=True)])


def scored(engine: TransformersTarget, num_nodes: int, num_sessions: int) -> float:
    """Milliseconds of one step; all of it is thrown away but the root, which the next step writes over."""
    tree = DraftTree(tuple(range(num_nodes)), (-1, *((node - 1) // 2 for node in range(1, num_nodes))))
    started = time.perf_counter()
    engine.step([Scoring(session, tree) for session in range(num_sessions)])
    taken = time.perf_counter() - started
    for session in range(num_sessions):
        engine.keep(session, Acceptance((0,), 0))
    return taken * 1e3


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = []
    sizes = {"max_tree_nodes": 65, "kv_tokens": 4096, "max_context": CONTEXT_TOKENS * 2, "num_threads": asked.threads}
    engines = {mode: TransformersTarget.load(resolve(asked.model), graphs=mode, **sizes) for mode in ("off", "on")}
    for num_nodes, num_sessions in STEPS:
        for engine in engines.values():
            opened(engine, num_sessions, CONTEXT_TOKENS - asked.rounds - 2)
            scored(engine, num_nodes, num_sessions)
        taken: dict[str, list[float]] = {mode: [] for mode in engines}
        for number in range(asked.rounds):
            for mode in sorted(engines, reverse=bool(number % 2)):
                taken[mode].append(scored(engines[mode], num_nodes, num_sessions))
        for engine in engines.values():
            for session in range(num_sessions):
                engine.release(session)
        ragged, static = (statistics.median(taken[mode]) for mode in ("off", "on"))
        rows.append({"nodes": num_nodes, "sessions": num_sessions, "ragged_ms": ragged, "static_ms": static})
        print(f"{num_nodes:3} nodes x {num_sessions}: ragged {ragged:8.2f} ms, static {static:8.2f} ms, {static / ragged:.3f}")
    if asked.output is not None:
        asked.output.write_text(json.dumps({**provenance(), "steps": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
