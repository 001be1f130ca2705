"""This file is the state of a training run on disk: weights and moments as safetensors, counters and history as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS, MOMENTS, PROGRESS = "weights.safetensors", "moments.safetensors", "progress.json"
_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Evaluated:
    """Acceptance lengths (tokens a round) that a run had reached at a step; keys are names of rules, "tree-16" for one."""

    step: int
    minutes: float
    lengths: dict[str, float]


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps and CPU minutes of training, and the history that its curves are drawn from."""

    step: int = 0
    minutes: float = 0.0
    losses: list[tuple[int, float, list[float]]] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)


def save_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.AdamW, progress: Progress) -> None:
    """Write a checkpoint; the one before stays whole until this one is complete."""
    partial = directory.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(_contiguous(model.state_dict()), partial / WEIGHTS)
    save_file(_moments(model, optimizer), partial / MOMENTS)
    (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
    former = directory.with_suffix(".former")
    if directory.exists():
        _remove(former)
        directory.rename(former)
    partial.rename(directory)
    _remove(former)


def load_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> Progress:
    """Put a checkpoint's state into a model and its optimizer; a run without one is at its start."""
    directory = directory if directory.exists() else directory.with_suffix(".former")
    if not directory.exists():
        return Progress()
    model.load_state_dict(load_file(directory / WEIGHTS))
    progress = read_progress(directory)
    moments = load_file(directory / MOMENTS)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(progress.step)),
            **{moment: moments[f"{name}/{moment}"] for moment in _MOMENT_NAMES},
        }
    return progress


def read_progress(directory: Path) -> Progress:
    """The progress that a checkpoint noted."""
    values = json.loads((directory / PROGRESS).read_text())
    losses = [(step, loss, agreement) for step, loss, agreement in values["losses"]]
    return Progress(values["step"], values["minutes"], losses, [Evaluated(**row) for row in values["evaluations"]])


def _moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    return {
        f"{name}/{moment}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in _MOMENT_NAMES
    }


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _remove(directory: Path) -> None:
    if directory.exists():
        for path in directory.iterdir():
            os.remove(path)
        directory.rmdir()
