"""Recordings whose rounds are known: what the drafter proposes, and the rank that the target's choice has there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treewire.core.budget import StepPrice
from treewire.simulation.recording import NOT_PROPOSED, MeasuredMachine, RecordedGeneration, Recording

HORIZON, WIDTH = 4, 6
MACHINE = MeasuredMachine(
    description="a machine of round numbers",
    verify=tuple(StepPrice(nodes, size, 0.010 + 0.001 * nodes * size) for nodes in (1, 64) for size in (1, 16)),
    draft=(StepPrice(1, 1, 0.004), StepPrice(1, 16, 0.004)),
    verify_wire_seconds=0.002,
    draft_wire_seconds=0.001,
    gateway_seconds=0.0005,
)


def recording(lengths: Sequence[int] = (20, 33, 7), seed: int = 0, skill: float = 0.7, prompt: int = 40) -> Recording:
    """Generations of these lengths, by a drafter whose best token is right with probability `skill`."""
    drawn = np.random.default_rng(seed)
    generations, first_row = [], 0
    for length in lengths:
        generations.append(RecordedGeneration(prompt, length, first_row))
        first_row += length - 1
    row = np.log(np.array([skill, *((1.0 - skill) * 0.5 ** np.arange(1, WIDTH))]))
    ranks = drawn.choice([*range(WIDTH), NOT_PROPOSED], size=(first_row, HORIZON), p=[*np.exp(row), 1.0 - np.exp(row).sum()])
    log_probs = np.broadcast_to(row, (first_row, HORIZON, WIDTH)).astype(np.float16).copy()
    return Recording("target", "drafter", tuple(generations), log_probs, ranks.astype(np.uint8), MACHINE, {})
