"""This file is what runs a step: the model over the rows of all parts, then the target's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from treewire.kv.rows import Moves
from verify_service.attention.layout import StepLayout
from verify_service.engine import Posterior, SessionId
from verify_service.engines.features import Computed
from verify_service.engines.transformers.choices import Chooser
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.selection import Forward


class Runner(Protocol):
    """A model over its KV store, wherever it runs. `num_missed_graphs` counts steps outside graphs, where there are graphs."""

    num_missed_graphs: int

    def step(self, parts: Sequence[Part]) -> Sequence[Posterior]:
        """Run all parts in one forward; one posterior each, in order.

        Raises FloatingPointError if logits are not finite, EngineLost if what runs the model is gone.
        """

    def move(self, moves: Moves) -> None:
        """Copy rows of the KV store before the next step; all are read before any is written."""

    def forget(self, session: SessionId) -> None:
        """The session has ended."""


class LocalRunner:
    """Runs the model in this process."""

    def __init__(self, forward: Forward, chooser: Chooser) -> None:
        self._forward = forward
        self._chooser = chooser
        self.num_missed_graphs = 0

    def step(self, parts: Sequence[Part]) -> Sequence[Posterior]:
        """Run all parts in one forward; one posterior each, in order."""
        logits, features = self._compute(parts)
        rows = torch.split(logits, [part.num_choices for part in parts])
        tapped = torch.split(features, [part.num_tapped for part in parts]) if len(features) else [features] * len(parts)
        return [
            replace(posterior, features=own.cpu().numpy()) if len(own) else posterior
            for posterior, own in zip(self._chooser.posteriors(parts, rows), tapped, strict=True)
        ]

    def move(self, moves: Moves) -> None:
        """Copy rows of the KV store."""
        device = self._forward.device
        sources, destinations = (torch.from_numpy(slots).to(device) for slots in (moves.sources, moves.destinations))
        self._forward.store.move(sources, destinations)

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._chooser.forget(session)

    def _compute(self, parts: Sequence[Part]) -> Computed:
        """One forward over all parts, for the logits and features that they want."""
        device = self._forward.device
        layout = StepLayout([part.segment(device) for part in parts])
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        wanted: list[int] = []
        tapped: list[int] = []
        stop = 0
        for part in parts:
            stop += len(part)
            wanted.extend(range(stop - part.num_choices, stop))
            tapped.extend(range(stop - part.num_tapped, stop))
        token_row, wanted_rows, tapped_rows = (
            torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (token_ids, wanted, tapped)
        )
        if not tapped or not self._forward.has_taps:
            logits = self._forward.logits(token_row, layout, wanted_rows)
            return Computed(logits, logits.new_empty(0, 0))
        return self._forward.compute(token_row, layout, wanted_rows, tapped_rows)
