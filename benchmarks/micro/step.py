"""This file is the cost of one target step on this machine: nodes x sessions, beside transformers' float32 plain decoding.

python -m benchmarks.micro.step [--model NAME] [--dtype int8] [--threads N] [--rounds N] [--json] [--output FILE]

Everything is measured in turns within one run, so that what else the machine does meets all of it alike; medians count. The
CPU time of a step, all threads together, says what it costs where other processes take the cores away in the middle of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.machine import provenance
from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.weights import DEFAULT_MODEL, resolve
from verify_service.engine import PrefillChunk, Scoring
from verify_service.engines.transformers import TransformersTarget

CONTEXT_TOKENS = 256
KV_TOKENS = 8192
BATCH_SIZE = 8
NUM_NODES = (1, 2, 4, 8, 16, 32, 64)
SEED = 0

REFERENCE = "transformers float32, 1 token"
BOUNDS = {"one token / transformers": 0.45, "eight nodes / one token": 1.5, "batch of 8 / 8 batches of 1": 0.5}


@dataclass(frozen=True)
class Timing:
    """One step's milliseconds over all rounds."""

    step: str
    median_ms: float
    min_ms: float
    median_cpu_ms: float


@dataclass(frozen=True)
class Ratio:
    """One quotient of medians, of wall and of CPU time, and what it must not exceed."""

    name: str
    wall: float
    cpu: float
    bound: float


def main() -> None:
    """Measure everything in turns and show it."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    directory = resolve(arguments.model)
    measured = _timings(directory, arguments.dtype, arguments.rounds)
    ratios = _ratios(measured)
    report = {
        **provenance(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "vnni": torch.cpu._is_vnni_supported(),
        "setting": {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "context_tokens": CONTEXT_TOKENS,
            "rounds": arguments.rounds,
        },
        "timings": [asdict(timing) for timing in measured],
        "ratios": [asdict(ratio) for ratio in ratios],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(arguments.dtype, measured, ratios)


def _timings(directory: Path, dtype: str, num_rounds: int) -> list[Timing]:
    steps = _steps(directory, dtype)
    wall_ms: dict[str, list[float]] = {name: [] for name in steps}
    cpu_ms: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_rounds + 1):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if number:  # the first round warms up
                wall_ms[name].append((time.perf_counter() - wall) * 1e3)
                cpu_ms[name].append((time.process_time() - cpu) * 1e3)
    return [
        Timing(name, *(round(value, 2) for value in (statistics.median(taken), min(taken), statistics.median(cpu_ms[name]))))
        for name, taken in wall_ms.items()
    ]


def _steps(directory: Path, dtype: str) -> dict[str, Callable[[], None]]:
    """Every step by its name, ready to be taken any number of times."""
    rng = random.Random(SEED)
    target = TransformersTarget.load(directory, dtype=dtype, kv_tokens=KV_TOKENS)
    for session in range(BATCH_SIZE):
        prompt = tuple(rng.randrange(target.target.vocabulary_size) for _ in range(CONTEXT_TOKENS))
        target.open(session, prompt, Sampling())
        target.step([PrefillChunk(session, prompt, last=True)])
    steps: dict[str, Callable[[], None]] = {REFERENCE: _plain_decoding(directory, rng)}
    for num_nodes in NUM_NODES:
        steps[_name(num_nodes)] = partial(_score, target, range(1), num_nodes, rng)
    for num_nodes in (1, 8):
        steps[_name(num_nodes, BATCH_SIZE)] = partial(_score, target, range(BATCH_SIZE), num_nodes, rng)
    return steps


def _name(num_nodes: int, batch_size: int = 1) -> str:
    return f"{num_nodes} nodes x {batch_size} sessions"


def _score(target: TransformersTarget, sessions: Sequence[int], num_nodes: int, rng: random.Random) -> None:
    """One step over a binary tree for each session, of which the root is kept."""
    token_ids = tuple(rng.randrange(target.target.vocabulary_size) for _ in range(num_nodes))
    tree = DraftTree(token_ids, (-1, *((node - 1) // 2 for node in range(1, num_nodes))))
    posteriors = target.step([Scoring(session, tree) for session in sessions])
    for session, posterior in zip(sessions, posteriors, strict=True):
        target.keep(session, Acceptance((0,), posterior.token_ids[0]))


def _plain_decoding(directory: Path, rng: random.Random) -> Callable[[], None]:
    """One token more of transformers' own greedy decoding, in float32 with its own cache."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache = DynamicCache()
    last = torch.tensor([[rng.randrange(model.config.vocab_size) for _ in range(CONTEXT_TOKENS)]])

    @torch.inference_mode()
    def step() -> None:
        nonlocal last
        logits = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        last = logits[:, -1].argmax(dim=-1, keepdim=True)

    step()
    return step


def _ratios(measured: Sequence[Timing]) -> list[Ratio]:
    wall = _quotients({timing.step: timing.median_ms for timing in measured})
    cpu = _quotients({timing.step: timing.median_cpu_ms for timing in measured})
    return [Ratio(name, round(wall[name], 3), round(cpu[name], 3), bound) for name, bound in BOUNDS.items()]


def _quotients(medians: dict[str, float]) -> dict[str, float]:
    one = medians[_name(1)]
    quotients = (one / medians[REFERENCE], medians[_name(8)] / one, medians[_name(1, BATCH_SIZE)] / (BATCH_SIZE * one))
    return dict(zip(BOUNDS, quotients, strict=True))


def _show(dtype: str, measured: Sequence[Timing], ratios: Sequence[Ratio]) -> None:
    times = Table("step", title=f"one step in {dtype}, {CONTEXT_TOKENS} tokens of context")
    for name in ("median ms", "min ms", "median CPU ms"):
        times.add_column(name, justify="right")
    for timing in measured:
        times.add_row(timing.step, f"{timing.median_ms:.1f}", f"{timing.min_ms:.1f}", f"{timing.median_cpu_ms:.1f}")
    bounds = Table("ratio of medians", title="what must hold")
    for name in ("wall", "CPU", "at most"):
        bounds.add_column(name, justify="right")
    for ratio in ratios:
        bounds.add_row(ratio.name, f"{ratio.wall:.2f}", f"{ratio.cpu:.2f}", f"{ratio.bound:.2f}")
    console = Console()
    console.print(times)
    console.print(bounds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of one target step on this machine.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory or name of the model (default: %(default)s)")
    parser.add_argument("--dtype", default="int8", help="type of our weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="times that everything is measured (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
