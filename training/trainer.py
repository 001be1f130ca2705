"""This file is the training loop: batches in, a drafter that accepts more out; it stops and goes on at any step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from draft_service.engines.precision import mixed_precision
from training.batches import Batch, Captured, epoch_plan
from training.checkpoints import Evaluated, Progress, load_checkpoint, save_checkpoint

CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a run learns: warm-up, a constant rate, then a linear fall to 0 over the last `decay_share`."""

    num_steps: int
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay_share: float = 0.4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        decay_steps = max(1, int(self.decay_share * self.num_steps))
        falling = (self.num_steps - step) / decay_steps
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps, falling)


@dataclass(frozen=True)
class Reporting:
    """How often, in steps, a run notes its loss, evaluates and saves."""

    loss_every: int = 10
    evaluate_every: int = 200
    save_every: int = 50


class Loss(Protocol):
    """A batch's loss and what is worth noting of it."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def agreement(self) -> list[float]: ...


Learn = Callable[[Batch, torch.Generator], Loss]
Evaluate = Callable[[], dict[str, float]]


@dataclass(frozen=True, eq=False)
class Run:
    """One training run: what learns, from what, how, and where it is kept."""

    drafter: nn.Module
    learn: Learn
    evaluate: Evaluate
    captured: Captured
    schedule: Schedule
    reporting: Reporting
    directory: Path


def train(run: Run, report: Callable[[Progress], None]) -> Progress:
    """Train to the end of the schedule, from the run's last checkpoint if it has one. Calls `report` where losses are noted."""
    optimizer = torch.optim.AdamW(
        run.drafter.parameters(), betas=(0.9, 0.95), weight_decay=run.schedule.weight_decay, fused=True
    )
    progress = load_checkpoint(run.directory / CHECKPOINT, run.drafter, optimizer)
    before, start = progress.minutes, time.process_time()
    for step, batch in _batches(run.captured, run.schedule, progress.step):
        learned = _step(run, optimizer, step, batch)
        progress = replace(progress, step=step + 1, minutes=before + (time.process_time() - start) / 60)
        progress = _noted(run, progress, learned)
        if progress.step % run.reporting.save_every == 0 or progress.step == run.schedule.num_steps:
            save_checkpoint(run.directory / CHECKPOINT, run.drafter, optimizer, progress)
        if progress.step % run.reporting.loss_every == 0:
            report(progress)
    return progress


def _step(run: Run, optimizer: torch.optim.AdamW, step: int, batch: Batch) -> Loss:
    for group in optimizer.param_groups:
        group["lr"] = run.schedule.rate(step)
    generator = torch.Generator().manual_seed(run.schedule.seed * 1_000_003 + step)
    with mixed_precision():
        learned = run.learn(batch, generator)
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(learned.loss)
    nn.utils.clip_grad_norm_(run.drafter.parameters(), run.schedule.clip_norm)
    optimizer.step()
    return learned


def _noted(run: Run, progress: Progress, learned: Loss) -> Progress:
    step, reporting = progress.step, run.reporting
    if step % reporting.loss_every == 0:
        progress = replace(progress, losses=[*progress.losses, (step, float(learned.loss.detach()), learned.agreement)])
    if step % reporting.evaluate_every == 0 or step == run.schedule.num_steps:
        evaluated = Evaluated(step, progress.minutes, run.evaluate())
        progress = replace(progress, evaluations=[*progress.evaluations, evaluated])
    return progress


def _batches(captured: Captured, schedule: Schedule, first_step: int) -> Iterator[tuple[int, Batch]]:
    """Numbered batches from `first_step` to the schedule's end, epoch after epoch."""
    step = 0
    for epoch in itertools.count():
        for keys in epoch_plan(captured.keys, schedule.batch_size, schedule.seed, epoch):
            if step >= schedule.num_steps:
                return
            if step >= first_step:
                yield step, captured.batch(keys)
            step += 1
