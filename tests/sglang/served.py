"""This file starts SGLang's ranks for a test model and makes engines over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.target_contract import MAX_CONTEXT, MAX_TREE_NODES
from verify_service.engines.ranks.processes import Ranks
from verify_service.engines.sglang import SglangOptions, SglangTarget, StartedSglang
from verify_service.engines.sglang.engine import describe
from verify_service.engines.sglang.messages import Ready
from verify_service.engines.sglang.traits import ModelTraits

WIDTHS = (9, 17, 33)
KV_TOKENS = 1024
SIZES: dict[str, Any] = {
    "max_tree_nodes": MAX_TREE_NODES,
    "max_context": MAX_CONTEXT,
    "max_total_tokens": KV_TOKENS,
    "max_sessions": 16,
    "tree_widths": WIDTHS,
    "mem_fraction_static": 0.5,
}


@dataclass(frozen=True)
class Served:
    """Loaded ranks, over which any number of engines can be made, one after the other."""

    ranks: Ranks
    ready: Ready
    options: SglangOptions

    def engine(self) -> SglangTarget:
        """A fresh engine, with no session and every KV slot free."""
        traits = ModelTraits.read(self.options.model_path)
        return SglangTarget(self.ranks, self.ready, describe(self.options, traits, str(self.options.model_path)))


@contextmanager
def served(model_path: Path, **options: Any) -> Iterator[Served]:
    """SGLang with that model, stopped at the end."""
    chosen = SglangOptions(model_path=model_path, **{**SIZES, **options})
    started = StartedSglang(chosen, str(model_path), num_threads=1)
    try:
        yield Served(started.ranks, started.ranks.load(), chosen)
    finally:
        started.stop()
