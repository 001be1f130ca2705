"""This file is the recipes: what each architecture needs to be made, taught, tried and written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draft_service.engines.dflash.model import DFlashDrafter
from draft_service.engines.recurrent import model as recurrent_model
from training.batches import Batch
from training.drafting import guess_with_blocks, guess_with_chains
from training.evaluation import Guess, GuessedAnswer
from training.learners import dflash, recurrent
from training.learners.learned import Learned
from training.learners.warm_start import block_drafter, recurrent_config, recurrent_drafter
from training.target import Target


@dataclass(frozen=True)
class Shape:
    """What is chosen about a drafter. `horizon` guesses; `num_layers` and `mask_token_id` concern block drafters alone."""

    architecture: str = "recurrent"
    horizon: int = 6
    num_candidates: int = 8192
    num_layers: int = 2
    mask_token_id: int = 0


@dataclass(frozen=True)
class Lesson:
    """What is chosen about a loss: a recurrent drafter is taught `depth` guesses; a sequence has `starts` chains or blocks."""

    depth: int = 4
    starts: int = 48
    decay: float = 4.0
    hard_share: float = 0.5


class Recipe(Protocol):
    """An architecture on one target."""

    @property
    def drafter(self) -> nn.Module:
        """What learns."""

    def learn(self, batch: Batch, generator: torch.Generator) -> Learned:
        """The loss of a batch."""

    def guess(self, batch: Batch, width: int, beam: int) -> list[GuessedAnswer[Guess]]:
        """What the drafter says after every token of a batch of answers."""

    def config(self) -> dict[str, Any]:
        """The drafter's `config.json`, without the target's fingerprint."""


@dataclass(frozen=True, eq=False)
class RecurrentRecipe:
    """The recurrent drafter."""

    drafter: recurrent_model.RecurrentDrafter
    objective: recurrent.RecurrentObjective

    def learn(self, batch: Batch, generator: torch.Generator) -> Learned:
        """The loss of a batch."""
        return recurrent.learn(self.drafter, batch, self.objective, generator)

    def guess(self, batch: Batch, width: int, beam: int) -> list[GuessedAnswer[Guess]]:
        """What the drafter says after every token of a batch of answers."""
        return guess_with_chains(self.drafter, batch, horizon=self.drafter.config.horizon, width=width, beam=beam)

    def config(self) -> dict[str, Any]:
        """The drafter's `config.json`, without the target's fingerprint."""
        return {"architecture": recurrent_model.ARCHITECTURE, **asdict(self.drafter.config)}


@dataclass(frozen=True, eq=False)
class BlockRecipe:
    """The block drafter, DFlash."""

    drafter: DFlashDrafter
    objective: dflash.BlockObjective

    def learn(self, batch: Batch, generator: torch.Generator) -> Learned:
        """The loss of a batch."""
        return dflash.learn(self.drafter, batch, self.objective, generator)

    def guess(self, batch: Batch, width: int, beam: int) -> list[GuessedAnswer[Guess]]:
        """What the drafter says after every token of a batch of answers; a block has no beam."""
        return guess_with_blocks(self.drafter, batch, width=width)

    def config(self) -> dict[str, Any]:
        """The drafter's `config.json`, without the target's fingerprint."""
        return self.drafter.config.to_json()


def make_recipe(
    target: Target, shape: Shape, lesson: Lesson, tapped_layers: Sequence[int], candidate_ids: Tensor, tap_scale: float
) -> Recipe:
    """A fresh drafter of a shape, started from the target's own layers. Raises ValueError for an unknown architecture."""
    make = {"recurrent": _recurrent, "dflash": _block}.get(shape.architecture)
    if make is None:
        raise ValueError(f"architecture is {shape.architecture!r}, it must be 'recurrent' or 'dflash'")
    return make(target, shape, lesson, tapped_layers, candidate_ids, tap_scale)


def _recurrent(
    target: Target, shape: Shape, lesson: Lesson, tapped_layers: Sequence[int], candidate_ids: Tensor, tap_scale: float
) -> Recipe:
    config = recurrent_config(target, tapped_layers, len(candidate_ids), shape.horizon)
    objective = recurrent.RecurrentObjective(lesson.depth, lesson.starts, lesson.decay, lesson.hard_share)
    return RecurrentRecipe(recurrent_drafter(target, config, candidate_ids, tap_scale), objective)


def _block(
    target: Target, shape: Shape, lesson: Lesson, tapped_layers: Sequence[int], candidate_ids: Tensor, tap_scale: float
) -> Recipe:
    drafter = block_drafter(target, tapped_layers, shape.num_layers, shape.horizon + 1, shape.mask_token_id)
    return BlockRecipe(drafter, dflash.BlockObjective(candidate_ids, lesson.starts, lesson.decay, lesson.hard_share))
