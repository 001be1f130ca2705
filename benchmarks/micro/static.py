"""This file is the cost of static buffers on this machine: the same trees on them, run eagerly, and as ragged rows.

python -m benchmarks.micro.static [--model NAME] [--threads N] [--rounds N] [--page-size N] [--output FILE]

A step is timed with the acceptance and the keep behind it, which on static buffers are in it. Both are measured in turns within
one run, with contexts and trees that just fill their buckets; medians and their quotients, of wall time and of CPU time, which
says what a step costs where other processes take the cores away in the middle of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads

from benchmarks.machine import provenance
from treewire.core.acceptance import accept
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


class Taken(NamedTuple):
    """Milliseconds of one step, or of a median one."""

    wall: float
    cpu: float


def scored(engine: TransformersTarget, num_nodes: int, num_sessions: int) -> Taken:
    """One step and its keep: of the root, as the target never says what is in the tree."""
    tree = DraftTree(tuple(range(num_nodes)), (-1, *((node - 1) // 2 for node in range(1, num_nodes))))
    started = time.perf_counter(), time.process_time()
    posteriors = engine.step([Scoring(session, tree, accepts=True) for session in range(num_sessions)])
    for session, posterior in enumerate(posteriors):
        engine.keep(session, posterior.acceptance or accept(tree, posterior.token_ids))
    return Taken((time.perf_counter() - started[0]) * 1e3, (time.process_time() - started[1]) * 1e3)


def median(taken: Sequence[Taken]) -> Taken:
    """Of each time by itself."""
    return Taken(statistics.median(one.wall for one in taken), statistics.median(one.cpu for one in taken))


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = []
    sizes = {"max_tree_nodes": 65, "kv_tokens": 4096, "max_context": CONTEXT_TOKENS * 2, "num_threads": asked.threads}
    sizes["kv_page_size"] = asked.page_size
    engines = {mode: TransformersTarget.load(resolve(asked.model), graphs=mode, **sizes) for mode in ("off", "on")}
    for num_nodes, num_sessions in STEPS:
        for engine in engines.values():
            opened(engine, num_sessions, CONTEXT_TOKENS - asked.rounds - 2)
            scored(engine, num_nodes, num_sessions)
        taken: dict[str, list[Taken]] = {mode: [] for mode in engines}
        for number in range(asked.rounds):
            for mode in sorted(engines, reverse=bool(number % 2)):
                taken[mode].append(scored(engines[mode], num_nodes, num_sessions))
        for engine in engines.values():
            for session in range(num_sessions):
                engine.release(session)
        ragged, static = median(taken["off"]), median(taken["on"])
        rows.append({"nodes": num_nodes, "sessions": num_sessions, "ragged": ragged._asdict(), "static": static._asdict()})
        wall, cpu = static.wall / ragged.wall, static.cpu / ragged.cpu
        print(
            f"{num_nodes:3} nodes x {num_sessions}: ragged {ragged.cpu:8.2f} ms of CPU, static {static.cpu:8.2f}, {cpu:.3f}",
            end="",
        )
        print(f" (wall {ragged.wall:.2f}, {static.wall:.2f}, {wall:.3f})", flush=True)
    if asked.output is not None:
        asked.output.write_text(json.dumps({**provenance(), "page_size": asked.page_size, "steps": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
