"""This file is the recurrent drafter as a network of sessions: depth by depth along each session's own best guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.engines.feature_drafter import Committed, Root
from draft_service.engines.recurrent.model import AttentionInputs, DraftCache, RecurrentDrafter
from draft_service.engines.torch_ranking import Ranked, rank
from treewire.core.tree import Marginals


@dataclass(eq=False)
class RecurrentState:
    """`cache` holds the rows of all positions with features; `last_feature` [hidden] is that of the last of them."""

    cache: DraftCache
    last_feature: Tensor


class RecurrentNetwork:
    """`FeatureNetwork` over the recurrent drafter.

    A committed position leaves its keys and values. A round computes the root's row, then one row a depth: the token that
    ranks best there, read back with the output that guessed it. What a depth says holds along that path; as marginals by
    depth it is an approximation beside it.
    """

    def __init__(self, model: RecurrentDrafter) -> None:
        self._model = model.eval()

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._model.embedding.device

    @property
    def candidate_ids(self) -> Tensor | None:
        """The tokens it can guess."""
        return self._model.candidate_ids

    def open(self) -> RecurrentState:
        """An empty cache; position 0 has no feature before it, which counts as zeros."""
        return RecurrentState(DraftCache(self._model.config), self._model.embedding.new_zeros(self._model.config.hidden_size))

    @torch.inference_mode()
    def take_in(self, committed: Sequence[Committed[RecurrentState]]) -> None:
        """Keys and values of these positions; no position attends, since none but a root's output is ever read."""
        committed = [item for item in committed if len(item.features)]
        if not committed:
            return
        preceding = [torch.cat([item.state.last_feature[None], item.features[:-1]]) for item in committed]
        token_ids = torch.tensor([token_id for item in committed for token_id in item.token_ids], device=self.device)
        counts = [len(item.features) for item in committed]
        inputs = self._inputs(
            self._model.rows(token_ids, torch.cat(preceding)),
            [position for item in committed for position in range(item.state.cache.length, _stop(item))],
        )
        for item, keys, values in zip(
            committed, torch.split(inputs.keys, counts), torch.split(inputs.values, counts), strict=True
        ):
            item.state.cache.write(item.state.cache.length, keys, values)
            item.state.cache.length = _stop(item)
            item.state.last_feature = item.features[-1]

    @torch.inference_mode()
    def draft(self, roots: Sequence[Root[RecurrentState]]) -> Sequence[Marginals]:
        """A row of marginals for each depth; sessions that want fewer depths drop out early."""
        rows: list[list[Ranked]] = [[] for _ in roots]
        active = [number for number, root in enumerate(roots) if root.depths]
        token_ids = [roots[number].token_id for number in active]
        carried = torch.stack([roots[number].state.last_feature for number in active]) if active else None
        while active and carried is not None:
            going = [roots[number] for number in active]
            depth = len(rows[active[0]])
            outputs = self._outputs(going, depth, token_ids, carried)
            ranked = self._ranked(going, depth, outputs)
            for number, ids, log_probs in zip(active, ranked.token_ids, ranked.log_probs, strict=True):
                rows[number].append(Ranked(ids, log_probs))
            kept = [index for index, number in enumerate(active) if roots[number].depths > depth + 1]
            token_ids = ranked.token_ids[kept, 0].tolist()
            carried = self._model.carried(outputs[kept])
            active = [active[index] for index in kept]
        return [_marginals(root, session_rows) for root, session_rows in zip(roots, rows, strict=True)]

    def _outputs(self, roots: Sequence[Root[RecurrentState]], depth: int, token_ids: Sequence[int], carried: Tensor) -> Tensor:
        """The layer's output of each session's row at this depth below its root, which is appended to its cache's rows."""
        rows = self._model.rows(torch.tensor(token_ids, device=self.device), carried)
        inputs = self._inputs(rows, [root.position + depth for root in roots])
        attended = []
        for root, queries, keys, values in zip(roots, *(torch.split(part, 1) for part in inputs), strict=True):
            stop = root.position + depth + 1
            root.state.cache.write(stop - 1, keys, values)
            attended.append(root.state.cache.attend(queries, torch.ones(1, stop, dtype=torch.bool)))
        return self._model.finish(rows, torch.cat(attended))

    def _inputs(self, rows: Tensor, positions: Sequence[int]) -> AttentionInputs:
        return self._model.attention_inputs(rows, torch.tensor(positions, device=self.device))

    def _ranked(self, roots: Sequence[Root[RecurrentState]], depth: int, outputs: Tensor) -> Ranked:
        """The best tokens after each output, by their ids in the vocabulary."""
        ranked = rank(
            self._model.log_probs(outputs),
            [root.noise for root in roots],
            [root.position + depth + 1 for root in roots],
            max(root.width for root in roots),
        )
        return Ranked(self._model.candidate_ids[ranked.token_ids], ranked.log_probs)


def _stop(committed: Committed[RecurrentState]) -> int:
    return committed.state.cache.length + len(committed.features)


def _marginals(root: Root[RecurrentState], rows: Sequence[Ranked]) -> Marginals:
    if not rows:
        return Marginals.empty()
    width = root.width
    return Marginals(
        torch.stack([row.token_ids[:width] for row in rows]).int().cpu().numpy(),
        torch.stack([row.log_probs[:width] for row in rows]).cpu().numpy(),
    )
