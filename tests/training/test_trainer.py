"""The training loop and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.conftest import fresh_recipe
from training.batches import Captured
from training.checkpoints import Progress
from training.recipes import Recipe
from training.target import Target
from training.trainer import Reporting, Run, Schedule, train
from training.workspace import Workspace


class Interrupted(Exception):
    """The run is stopped from outside."""


def run_of(recipe: Recipe, workspace: Workspace, directory: Path) -> Run:
    """Eight steps, saved and noted every four."""
    schedule, reporting = Schedule(num_steps=8, batch_size=4, warmup_steps=2), Reporting(4, 4, 4)
    return Run(recipe.drafter, recipe.learn, lambda: {"chain": 1.0}, Captured(workspace.shards), schedule, reporting, directory)


def weights(recipe: Recipe) -> dict[str, Tensor]:
    """A copy of a drafter's weights."""
    return {name: tensor.clone() for name, tensor in recipe.drafter.state_dict().items()}


def interrupt_at(step: int) -> Callable[[Progress], None]:
    """A report that stops the run."""

    def report(progress: Progress) -> None:
        if progress.step == step:
            raise Interrupted

    return report


@pytest.mark.parametrize("architecture", ["recurrent", "dflash"])
def test_a_resumed_run_ends_with_the_same_weights(
    architecture: str, target: Target, workspace: Workspace, tmp_path: Path
) -> None:
    """Stopped half way and started again by a new process, a run ends bit for bit where an undisturbed one does."""
    whole = fresh_recipe(target, workspace, architecture)
    start = weights(whole)
    train(run_of(whole, workspace, tmp_path / "whole"), lambda progress: None)
    stopped = fresh_recipe(target, workspace, architecture)
    with pytest.raises(Interrupted):
        train(run_of(stopped, workspace, tmp_path / "stopped"), interrupt_at(4))
    resumed = fresh_recipe(target, workspace, architecture)
    progress = train(run_of(resumed, workspace, tmp_path / "stopped"), lambda progress: None)
    expected, reached = weights(whole), weights(resumed)
    assert all(torch.equal(expected[name], reached[name]) for name in expected)
    assert any(not torch.equal(expected[name], start[name]) for name in expected)
    assert [step for step, _, _ in progress.losses] == [4, 8]
    assert [row.step for row in progress.evaluations] == [4, 8]


def test_training_lowers_the_loss(target: Target, workspace: Workspace, tmp_path: Path) -> None:
    """On sixteen sequences seen over and over, the loss falls."""
    recipe = fresh_recipe(target, workspace)
    schedule = Schedule(num_steps=30, batch_size=8, learning_rate=5e-3, warmup_steps=2)
    captured = Captured(workspace.shards)
    run = Run(recipe.drafter, recipe.learn, dict, captured, schedule, Reporting(1, 100, 100), tmp_path)
    progress = train(run, lambda progress: None)
    losses = [loss for _, loss, _ in progress.losses]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    """Warm-up from the first step, a plateau, then a straight line that would reach 0 after the last step."""
    schedule = Schedule(num_steps=100, learning_rate=1.0, warmup_steps=10, decay_share=0.5)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(30) == 1.0
    assert schedule.rate(75) == pytest.approx(0.5)
    assert schedule.rate(99) == pytest.approx(0.02)
