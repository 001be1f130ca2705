"""This file is the target over several ranks as their parent has it: what they are started with, told, and asked."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from treewire.checkpoint import feature_projection
from treewire.kv.pages import PagedKv
from treewire.kv.rows import Moves
from verify_service.engine import Posterior, RankMemory, SessionId, Target, Unsupported
from verify_service.engines.ranks.processes import Ranks
from verify_service.engines.ranks.questions import RankDistributions
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.checkpoint import Checkpoint
from verify_service.engines.transformers.engine import TransformersTarget
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.selection import ForwardKind, longest_context
from verify_service.engines.transformers.shard import Shard, check_shards
from verify_service.engines.transformers.static_step import GraphsMode

_DTYPES = ("float32", "bfloat16", "float16")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorParallelOptions:
    """How a model is served over `tp_size` ranks on `nnodes` machines. Raises ValueError for what cannot be meant.

    `max_context` in tokens, None is the model's own; `kv_tokens` token positions fit in all sessions together, on every
    rank its heads of them. `num_threads` is each rank's. `dist_init_addr` is host:port on machine 0, where the ranks of
    several machines meet; those of one machine meet in a file. `device` is "cpu", or "cuda": one GPU a rank from
    `base_gpu_id` on.
    """

    model_path: Path
    tp_size: int
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
    base_gpu_id: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    max_context: int | None = None
    max_tree_nodes: int = 1024
    kv_tokens: int = 16384
    kv_page_size: int = 1
    num_threads: int | None = None
    feature_projection: Path | None = None
    graphs: GraphsMode = "auto"

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.nnodes < 1 or self.tp_size % self.nnodes:
            raise ValueError(f"tp_size is {self.tp_size}, it must be a multiple of nnodes, {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank is {self.node_rank}, with nnodes {self.nnodes} the ranks are 0 to {self.nnodes - 1}")
        if self.nnodes > 1 and not self.dist_init_addr:
            raise ValueError(f"dist_init_addr is not set: with nnodes {self.nnodes} the ranks meet at host:port of machine 0")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device}: ranks run on cpu, or on cuda from base_gpu_id on")

    @property
    def uses_graphs(self) -> bool:
        """Whether trees run on static buffers."""
        return self.graphs == "on" or (self.graphs == "auto" and self.device == "cuda")

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        count = self.tp_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True)
class TensorParallelPlan:
    """What one rank is started with. `meeting` is where all ranks find each other, as `torch.distributed` writes it."""

    options: TensorParallelOptions
    rank: int
    meeting: str

    @property
    def device(self) -> str:
        """Where this rank computes."""
        if self.options.device == "cpu":
            return "cpu"
        return f"cuda:{self.options.base_gpu_id + self.rank - self.options.local_ranks.start}"


@dataclass(frozen=True)
class StepCommand:
    """Forget these sessions, move these rows, one after the other, then compute these parts in one forward."""

    forgotten: tuple[SessionId, ...]
    moves: tuple[Moves, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StepAnswer:
    """One posterior a part, in order; how many steps ran outside graphs so far."""

    posteriors: tuple[Posterior, ...]
    num_missed_graphs: int


@dataclass(frozen=True)
class TensorParallelReady:
    """The model is loaded; what each rank holds, in order."""

    memory: tuple[RankMemory, ...]


@dataclass(frozen=True, eq=False)
class FoundMasks:
    """Masks that need no waiting any more: `verify_service.engine.Masks`."""

    found: NDArray[np.int32]

    def rows(self) -> NDArray[np.int32]:
        """The rows, as they were found."""
        return self.found


class RemoteRunner:
    """`verify_service.engines.transformers.runner.Runner` over ranks in processes of their own.

    What has to be moved or forgotten goes along with the next step: nothing needs it earlier. Masks are found before it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.num_missed_graphs = 0
        self._forgotten: list[SessionId] = []
        self._moves: list[Moves] = []

    def step(self, parts: Sequence[Part]) -> Sequence[Posterior]:
        """Run all parts in one forward; one posterior each, in order."""
        command = StepCommand(tuple(self._forgotten), tuple(self._moves), tuple(_sendable(part) for part in parts))
        self._forgotten.clear()
        self._moves.clear()
        answer: StepAnswer = self._ranks.step(command)
        self.num_missed_graphs = answer.num_missed_graphs
        posteriors = answer.posteriors
        return [
            replace(posterior, distributions=RankDistributions(self._ranks, number)) if posterior.token_ids else posterior
            for number, posterior in enumerate(posteriors)
        ]

    def move(self, moves: Moves) -> None:
        """Copy rows of the KV store before the next step."""
        self._moves.append(moves)

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._forgotten.append(session)


class StartedTransformers:
    """The ranks from the moment that they are started: loading, then served, in the end stopped.

    Raises Unsupported, with the numbers, for a model or a type of weights that the ranks cannot share.
    """

    def __init__(self, options: TensorParallelOptions, name: str, forward: ForwardKind = "auto") -> None:
        self._options = options
        self._target = _checked_target(options, name, forward)
        self._folder = tempfile.TemporaryDirectory(prefix="treewire-ranks-")
        meeting = f"tcp://{options.dist_init_addr}" if options.nnodes > 1 else f"file://{self._folder.name}/meeting"
        self.ranks = Ranks.start(run_plan, {rank: TensorParallelPlan(options, rank, meeting) for rank in options.local_ranks})

    def load(self) -> TransformersTarget:
        """The engine, once the model is loaded. Raises Unsupported with a reason, EngineLost if a rank ends."""
        ready: TensorParallelReady = self.ranks.load()
        for memory in ready.memory:
            _log.info("rank %d holds %d bytes of weights, %d of KV", memory.rank, memory.weight_bytes, memory.kv_bytes)
        return self.engine(ready)

    def engine(self, ready: TensorParallelReady) -> TransformersTarget:
        """A fresh engine over the loaded ranks, with no session and every KV slot free."""
        kv = PagedKv(self._options.kv_tokens, self._options.kv_page_size)
        return TransformersTarget(RemoteRunner(self.ranks), replace(self._target, ranks=ready.memory), kv)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called with the reason, on another thread, when a rank is lost."""
        self.ranks.watch(on_lost)

    def stop(self) -> None:
        """End the ranks."""
        self.ranks.stop()
        self._folder.cleanup()


def run_plan(plan: TensorParallelPlan, parent: Connection) -> None:
    """In the new process: what is heavy is imported there alone."""
    from verify_service.engines.transformers.rank import run_rank

    run_rank(plan, parent)


def rank_memory(options: TensorParallelOptions, architecture: Architecture, rank: int, weight_bytes: int) -> RankMemory:
    """What a rank holds: the weights that it read, and its heads of every KV slot."""
    own = Shard(rank, options.tp_size).of(architecture)
    elements = 2 * own.num_layers * own.num_kv_heads * own.head_size
    num_slots = PagedKv(options.kv_tokens, options.kv_page_size).num_slots
    return RankMemory(rank, weight_bytes, num_slots * elements * getattr(torch, options.dtype).itemsize)


def _checked_target(options: TensorParallelOptions, name: str, forward: ForwardKind) -> Target:
    if forward == "transformers":
        raise Unsupported(f"the forward of transformers runs on one rank, tp_size is {options.tp_size}")
    if options.dtype not in _DTYPES:
        raise Unsupported(f"{options.dtype} is computed on one rank, tp_size is {options.tp_size}")
    if not Checkpoint.is_one(options.model_path):
        raise Unsupported(f"ranks load a directory with config.json and safetensors, {options.model_path} is none")
    checkpoint = Checkpoint(options.model_path)
    architecture = Architecture.from_config(checkpoint.config)
    check_shards(architecture, options.tp_size)
    projection = feature_projection(options.feature_projection) if options.feature_projection else None
    return Target(
        engine="transformers",
        model=name,
        vocabulary_size=architecture.vocabulary_size,
        tokenizer_hash=checkpoint.tokenizer_hash,
        max_tree_nodes=options.max_tree_nodes,
        max_context=longest_context([architecture.max_context], options.max_context),
        end_token_ids=checkpoint.end_token_ids,
        feature_size=projection.feature_size if projection else 0,
        tapped_layers=projection.tapped_layers if projection else (),
        feature_projection_hash=projection.hash if projection else "",
    )


def _sendable(part: Part) -> Part:
    return part if part.masks is None else replace(part, masks=FoundMasks(part.masks.rows()))
