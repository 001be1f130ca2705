"""This file is a recording: what a drafter proposed at every position of real generations, and what the target chose there."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from treewire.core.budget import StepPrice
from treewire.core.build import BuiltTree, build_tree
from treewire.core.tree import Marginals

RECORDING_VERSION = 1
SHIPPED = Path(__file__).parent / "recordings" / "smollm2-135m.npz"
NOT_PROPOSED = 255
"""What stands for the rank of a choice that was not among the tokens proposed for its depth."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error, NotImplementedError)
"""What reading an archive raises that is damaged, or none."""


class RecordingError(ValueError):
    """A file is no recording that can be replayed; the message says why."""


class RecordedGeneration(NamedTuple):
    """One generation: its prompt's tokens, its output's tokens, and the position at which its rows begin."""

    num_prompt_tokens: int
    num_tokens: int
    first_row: int


@dataclass(frozen=True)
class MeasuredMachine:
    """What rounds cost on the machine that was recorded, in seconds.

    `verify` and `draft` are engine steps over sessions with so many new positions each. The rest is of one generation alone:
    `verify_wire_seconds` and `draft_wire_seconds` what a round trip takes beside the engine's step, `gateway_seconds` what the
    gateway does for one of the two messages of a round.
    """

    description: str
    verify: tuple[StepPrice, ...]
    draft: tuple[StepPrice, ...]
    verify_wire_seconds: float
    draft_wire_seconds: float
    gateway_seconds: float

    def to_json(self) -> dict[str, Any]:
        """As the recording keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MeasuredMachine:
        """The machine of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        prices = {name: tuple(StepPrice(**price) for price in values[name]) for name in ("verify", "draft")}
        return cls(**{**values, **prices})


@dataclass(frozen=True, eq=False)
class Recording:
    """Rounds that can be begun at any position of the recorded outputs.

    Row i of a generation belongs to the round whose root is the generation's token i. `log_probs`, float16 [rows, depths,
    width], are the drafter's, best first and -inf where nothing was proposed; `choices`, uint8 [rows, depths], the ranks that
    the target's own tokens have there, or NOT_PROPOSED. Which tokens they were decides nothing and is not kept.
    Raises RecordingError if the parts do not fit.
    """

    target: str
    drafter: str
    generations: tuple[RecordedGeneration, ...]
    log_probs: NDArray[np.float16]
    choices: NDArray[np.uint8]
    machine: MeasuredMachine
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.generations:
            raise RecordingError("the recording has no generation, at least one is needed")
        if self.log_probs.ndim != 3 or self.choices.shape != self.log_probs.shape[:2]:
            raise RecordingError(f"log-probs have shape {self.log_probs.shape}, the choices {self.choices.shape}")
        rows = 0
        for generation in self.generations:
            if generation.first_row != rows or generation.num_tokens < 1 or generation.num_prompt_tokens < 1:
                raise RecordingError(f"{generation} is no generation whose rows begin at {rows}")
            rows += generation.num_tokens - 1
        if rows != len(self.log_probs):
            raise RecordingError(f"the generations have {rows} rows, {len(self.log_probs)} are there")

    @property
    def num_tokens(self) -> int:
        """Output tokens of all generations together."""
        return sum(generation.num_tokens for generation in self.generations)

    @property
    def horizon(self) -> int:
        """Depths that the drafter looks ahead."""
        return int(self.choices.shape[1])

    @property
    def width(self) -> int:
        """Tokens kept of each depth."""
        return int(self.log_probs.shape[2])

    def save(self, path: Path) -> None:
        """Write it as a compressed NumPy archive."""
        header = {
            "version": RECORDING_VERSION,
            "target": self.target,
            "drafter": self.drafter,
            "generations": self.generations,
            "machine": self.machine.to_json(),
            "provenance": self.provenance,
        }
        with path.open("wb") as file:
            np.savez_compressed(file, header=np.array(json.dumps(header)), log_probs=self.log_probs, choices=self.choices)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """The recording of a file. Raises RecordingError, with the file's name, if it is none."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                header = json.loads(str(archive["header"]))
                log_probs, choices = archive["log_probs"], archive["choices"]
            if header["version"] != RECORDING_VERSION:
                raise RecordingError(f"version is {header['version']!r}, this reader knows {RECORDING_VERSION}")
            return cls(
                target=header["target"],
                drafter=header["drafter"],
                generations=tuple(RecordedGeneration(*values) for values in header["generations"]),
                log_probs=log_probs,
                choices=choices,
                machine=MeasuredMachine.from_json(header["machine"]),
                provenance=header["provenance"],
            )
        except _UNREADABLE as error:
            raise RecordingError(f"{path} is no recording: {error}") from error


class ReplayedTree(NamedTuple):
    """The largest tree of a row: `path` are the nodes of the target's choices, root excluded, as far as the tree has them."""

    built: BuiltTree
    path: tuple[int, ...]

    def num_nodes(self, budget: int) -> int:
        """Nodes of the tree that a budget builds, root included."""
        return min(budget + 1, len(self.built.tree))

    def num_accepted(self, budget: int) -> int:
        """Drafted tokens that the target accepts of the tree that a budget builds: trees are nested in their budget."""
        return bisect_right(self.path, budget)


class Rounds:
    """The trees that the rows of a recording give, built when first asked for, and what the target accepts of them."""

    def __init__(self, recording: Recording, max_budget: int) -> None:
        self.recording = recording
        self.max_budget = max_budget
        self._trees: dict[tuple[int, int], ReplayedTree] = {}
        self._cuts: dict[tuple[int, int, int], BuiltTree] = {}

    def tree(self, row: int, width: int) -> ReplayedTree:
        """The largest tree from the `width` best tokens of each depth; width 1 is a chain."""
        known = self._trees.get((row, width))
        if known is None:
            known = self._trees[row, width] = self._replayed(row, width)
        return known

    def cut(self, row: int, width: int, budget: int) -> BuiltTree:
        """The tree of a smaller budget."""
        known = self._cuts.get((row, width, budget))
        if known is None:
            known = self._cuts[row, width, budget] = self.tree(row, width).built.cut(budget)
        return known

    def _replayed(self, row: int, width: int) -> ReplayedTree:
        log_probs = self.recording.log_probs[row, :, :width].astype(np.float32)
        ranks = np.broadcast_to(np.arange(log_probs.shape[1], dtype=np.int32), log_probs.shape)
        built = build_tree(0, Marginals(ranks, log_probs), self.max_budget)
        path, node = [], 0
        for rank in self.recording.choices[row].tolist():
            after = next((child for child in built.tree.children[node] if built.ranks[child] == rank), None)
            if after is None:
                break
            path.append(after)
            node = after
        return ReplayedTree(built, tuple(path))
