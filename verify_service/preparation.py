"""This file is an engine before it is loaded: some run in processes of their own, which start before any server does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verify_service.engine import TargetEngine


class Preparation(Protocol):
    """An engine that is about to be loaded, and what belongs to it until the end of the process."""

    def load(self) -> TargetEngine:
        """The engine, loaded. Takes as long as it takes."""

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called with the reason, on any thread, should the engine be lost though nobody calls it."""

    def stop(self) -> None:
        """End what was started."""


@dataclass(frozen=True)
class InProcess:
    """An engine within this process: made by `load`, and lost only with the process."""

    load: Callable[[], TargetEngine]

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """There is nothing to be told."""

    def stop(self) -> None:
        """There is nothing to end."""
