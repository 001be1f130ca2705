"""This file is the shipped drafter: weights in half precision, their shape, a card, curves and checksums, in one directory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from training.checkpoints import Progress
from training.report import BUDGETS, draw_curves

READABLE = 0o644  # safetensors writes files for their owner alone
WEIGHTS, CONFIG, CARD, SUMS, CURVES = "model.safetensors", "config.json", "README.md", "SHA256SUMS", "curves.png"


@dataclass(frozen=True)
class Fingerprint:
    """The target that a drafter belongs to."""

    model: str
    vocabulary_size: int
    tokenizer_hash: str


@dataclass(frozen=True)
class DataSource:
    """What a drafter learnt from: where the prompts come from, under which licence, and how many generated tokens."""

    name: str
    licence: str
    num_tokens: int


@dataclass(frozen=True)
class Story:
    """What a card tells besides the shape: data, effort and results.

    Lengths are tokens a round, by rule. `num_positions` were captured, prompts included: perhaps fewer than were generated.
    """

    target: Fingerprint
    sources: tuple[DataSource, ...]
    num_positions: int
    progress: Progress
    num_held_out: int
    num_held_out_tokens: int
    lengths: dict[str, float]
    ngram_length: float
    notes: str


def ship(directory: Path, drafter: nn.Module, config: dict[str, Any], story: Story) -> None:
    """Write a drafter's directory; what was there under these names is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.half().contiguous() if tensor.is_floating_point() else tensor.to(torch.int32).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS)
    (directory / WEIGHTS).chmod(READABLE)
    target = {
        "model": story.target.model,
        "vocabulary_size": story.target.vocabulary_size,
        "tokenizer_hash": story.target.tokenizer_hash,
    }
    (directory / CONFIG).write_text(json.dumps({**config, "dtype": "float16", "target": target}, indent=2) + "\n")
    draw_curves(story.progress, directory / CURVES)
    (directory / CARD).write_text(card(config, story, sum(tensor.numel() for tensor in drafter.parameters())))
    names = sorted((WEIGHTS, CONFIG, CARD, CURVES))
    (directory / SUMS).write_text("".join(f"{_sha256(directory / name)}  {name}\n" for name in names))


def card(config: dict[str, Any], story: Story, num_parameters: int) -> str:
    """The model card, Markdown."""
    kind = config.get("architecture", "DFlash, block diffusion")
    table = "\n".join(_acceptance_table(story))
    data = "\n".join(f"| {source.name} | {source.licence} | {source.num_tokens:,} |" for source in story.sources)
    return f"""# A drafter for {story.target.model}

Architecture: {kind}. {num_parameters / 1e6:.1f} million trained parameters, float16; embedding and output head are the target's
and not in this file. Trained by `python -m training`, on a CPU, from the target's own hidden states and distributions.

## Acceptance

Mean acceptance length (tokens a round, bonus included) on {story.num_held_out} held-out chat prompts,
{story.num_held_out_tokens:,} tokens, greedy, by exact simulation on the target's own answers in float32:

{table}

## Training

{story.progress.step:,} optimizer steps, {story.progress.minutes:.0f} CPU minutes, without what generation and capture took.
Curves: `curves.png` (acceptance there is on a quarter of the held-out prompts).

| prompts from | licence | generated tokens |
|--|--|--|
{data}

{story.num_positions:,} positions of these, prompts included, were captured and trained on. The answers are the target's own.
The held-out prompts are a source of their own, written by hand; no training prompt equals one of them.

## Limits

{story.notes}

Licence: Apache-2.0.
"""


def _acceptance_table(story: Story) -> list[str]:
    conditional = any(name.startswith("conditional") for name in story.lengths)
    columns = ["rule", *(f"{budget} nodes" for budget in BUDGETS)]
    rows = [["tree over marginals by depth", *(f"{story.lengths[f'tree-{budget}']:.2f}" for budget in BUDGETS)]]
    if conditional:
        rows.append(["tree over conditional guesses", *(f"{story.lengths[f'conditional-{budget}']:.2f}" for budget in BUDGETS)])
    table = ["| " + " | ".join(columns) + " |", "|" + "--|" * len(columns), *("| " + " | ".join(row) + " |" for row in rows)]
    return [
        *table,
        "",
        f"Chain: {story.lengths['chain']:.2f}. Prompt look-up (n-gram): {story.ngram_length:.2f}. Plain decoding: 1.",
    ]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
