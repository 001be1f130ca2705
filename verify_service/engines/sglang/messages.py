"""This file is what the engine and its ranks say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewire.core.history import NodeHistories
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import Posterior


@dataclass(frozen=True)
class Place:
    """Where a rank is: its number among all, the GPU it has on its machine, the port where the ranks of one machine meet."""

    tp_rank: int
    gpu_id: int
    dist_port: int


@dataclass(frozen=True)
class RankPlan:
    """All that a rank is started with. `arguments` are those of SGLang's `ServerArgs`."""

    place: Place
    num_ranks: int
    arguments: Mapping[str, Any]
    widths: tuple[int, ...]
    tap_layers: tuple[int, ...]
    feature_projection: Path | None
    hidden_size: int
    num_layers: int
    max_sessions: int
    num_threads: int | None


@dataclass(frozen=True)
class Part:
    """One session's tokens in a step: a chunk of its prompt, or a tree.

    `row` is the session's row in SGLang's table of KV slots, `prefix_length` how many tokens of it are computed already.
    `slots` go into the row from position `write_from` on; the last of them are the part's own. The target chooses after
    the last `num_choices` tokens; `histories` is what was said before each choice, where sampling reads it. If any part
    `is_masked`, StepMasks follow the step.
    """

    row: int
    prefix_length: int
    write_from: int
    slots: tuple[int, ...]
    token_ids: tuple[int, ...]
    tree: DraftTree | None
    num_choices: int
    sampling: Sampling
    num_node_probabilities: int
    histories: NodeHistories | None = None
    wants_features: bool = False
    is_masked: bool = False

    @property
    def own_slots(self) -> tuple[int, ...]:
        """Where the keys and values of the part's tokens go."""
        return self.slots[len(self.slots) - len(self.token_ids) :]


@dataclass(frozen=True)
class StepCommand:
    """Compute these parts: all chunks in one forward, all trees in one forward."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Ready:
    """The model is loaded: room for that many token positions and sessions, and whether trees run in CUDA graphs."""

    num_slots: int
    num_rows: int
    attention_backend: str
    captured: bool


@dataclass(frozen=True)
class StepAnswer:
    """One posterior a part, in order; how many padding nodes were computed; whether the trees missed the graph."""

    posteriors: tuple[Posterior, ...]
    num_padding: int
    missed_graph: bool
