"""This file starts the ranks of a target for tests, and makes engines over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.target_contract import MAX_CONTEXT, MAX_TREE_NODES
from verify_service.engines.ranks.processes import Ranks
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.tensor_parallel import (
    StartedTransformers,
    TensorParallelOptions,
    TensorParallelReady,
)

SIZES: dict[str, Any] = {
    "max_tree_nodes": MAX_TREE_NODES,
    "max_context": MAX_CONTEXT,
    "kv_tokens": 1024,
    "num_threads": 1,
}


@dataclass(frozen=True)
class Served:
    """Loaded ranks, over which any number of engines can be made, one after the other."""

    started: StartedTransformers
    ready: TensorParallelReady

    @property
    def ranks(self) -> Ranks:
        """The processes."""
        return self.started.ranks

    def engine(self) -> TransformersTarget:
        """A fresh engine, with no session and every KV slot free."""
        return self.started.engine(self.ready)


@contextmanager
def served(model_path: Path, tp_size: int, **options: Any) -> Iterator[Served]:
    """Ranks with that model, stopped at the end."""
    started = StartedTransformers(TensorParallelOptions(model_path, tp_size, **{**SIZES, **options}), str(model_path))
    try:
        yield Served(started, started.ranks.load())
    finally:
        started.stop()
