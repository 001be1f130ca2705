"""This file is the recurrent drafter as a network of sessions: depth by depth along each session's own likeliest guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.engines.feature_drafter import Committed, Root
from draft_service.engines.recurrent.model import AttentionInputs, DraftCache, RecurrentDrafter
from draft_service.engines.torch_ranking import SessionNoise, rank
from treewire.core.tree import Marginals
from treewire.kv.store import KvStore

_LAYER = 0  # the only one


class RecurrentNetwork:
    """`FeatureNetwork` over the recurrent drafter.

    A committed position leaves its keys and values in its slot. A round copies a session's into one piece, once, and puts its
    drafted rows behind them. It computes the root's row, then at each depth those of the `beam` likeliest prefixes there, each
    read back with the output that guessed it. What the best prefix of a depth says is that depth's row of the marginals, an
    approximation beside it; what the others say are conditional rows, for sessions that take them. The others draft along the
    best prefix alone.
    """

    def __init__(self, model: RecurrentDrafter, store: KvStore, *, beam: int = 1) -> None:
        self._model = model.eval()
        self._store = store
        self._beam = beam

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._model.embedding.device

    @property
    def candidate_ids(self) -> Tensor | None:
        """The tokens it can guess."""
        return self._model.candidate_ids

    @torch.inference_mode()
    def take_in(self, committed: Sequence[Committed]) -> None:
        """Keys and values of these positions; no position attends, since none but a root's output is ever read."""
        committed = [item for item in committed if len(item.features)]
        if not committed:
            return
        preceding = [torch.cat([item.preceding_feature[None], item.features[:-1]]) for item in committed]
        token_ids = torch.tensor([token_id for item in committed for token_id in item.token_ids], device=self.device)
        inputs = self._inputs(
            self._model.rows(token_ids, torch.cat(preceding)),
            [item.position + index for item in committed for index in range(len(item.features))],
        )
        slots = torch.from_numpy(np.concatenate([item.slots for item in committed]))
        self._store.write(_LAYER, slots.to(self.device), inputs.keys, inputs.values)

    @torch.inference_mode()
    def draft(self, roots: Sequence[Root]) -> Sequence[Marginals]:
        """Rows for each depth and, where they are taken, for prefixes; sessions that want fewer depths drop out early."""
        beams = [self._begun(root) for root in roots]
        going = [beam for beam in beams if beam.is_going]
        carried = torch.stack([beam.root.last_feature for beam in going]) if going else None
        while carried is not None:
            outputs = self._outputs(going, carried)
            rows, first = self._rows(going, outputs), 0
            parents: list[int] = []
            for beam in going:
                stop = first + len(beam.paths)
                parents += [first + parent for parent in beam.descend(rows.of(beam, slice(first, stop)))]
                first = stop
            going = [beam for beam in going if beam.is_going]
            carried = self._model.carried(outputs[parents]) if going else None
        return [beam.marginals() for beam in beams]

    def _begun(self, root: Root) -> _Beam:
        """A round's beam, with a copy of what the root sees and room for all rows that are drafted."""
        size = self._beam if root.takes_conditional else 1
        cache = DraftCache(self._model.config, capacity=len(root.slots) + 1 + size * max(0, root.depths - 1))
        if len(root.slots):
            cache.write(0, *self._store.read(_LAYER, torch.from_numpy(root.slots).to(self.device)))
        return _Beam(root, size, cache)

    def _outputs(self, beams: Sequence[_Beam], carried: Tensor) -> Tensor:
        """The layer's output of each beam's newest prefixes, one after the other; their keys and values go behind what its
        cache holds."""
        counts = [len(beam.paths) for beam in beams]
        rows = self._model.rows(
            torch.tensor([token for beam in beams for token in beam.token_ids], device=self.device), carried
        )
        inputs = self._inputs(rows, [beam.position for beam in beams for _ in beam.paths])
        parts = (torch.split(part, counts) for part in inputs)
        attended = [beam.attend(*part) for beam, *part in zip(beams, *parts, strict=True)]
        return self._model.finish(rows, torch.cat(attended))

    def _inputs(self, rows: Tensor, positions: Sequence[int]) -> AttentionInputs:
        return self._model.attention_inputs(rows, torch.tensor(positions, device=self.device))

    def _rows(self, beams: Sequence[_Beam], outputs: Tensor) -> _Rows:
        """What follows each output: the best tokens, by their ids in the vocabulary."""
        noises = [beam.root.noise for beam in beams for _ in beam.paths]
        positions = [beam.position + 1 for beam in beams for _ in beam.paths]
        ranked = rank(self._model.logits(outputs), noises, positions, max(beam.root.width for beam in beams))
        noise = [_noise_of(row, position, ids) for row, position, ids in zip(noises, positions, ranked.token_ids, strict=True)]
        return _Rows(
            self._model.candidate_ids[ranked.token_ids].int().cpu().numpy(),
            ranked.log_probs.cpu().numpy(),
            torch.stack(noise).cpu().numpy(),
        )


class _Rows(NamedTuple):
    """Tokens after some prefixes, best first, with log-probs and noise; int32 and float32 [prefixes, width]."""

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    noise: NDArray[np.float32]

    def of(self, beam: _Beam, share: slice) -> _Rows:
        """A beam's share, of its own width."""
        return self.part(share, slice(beam.root.width))

    def part(self, prefixes: slice, width: slice = slice(None)) -> _Rows:
        """Some prefixes, some of their tokens."""
        return _Rows(self.token_ids[prefixes, width], self.log_probs[prefixes, width], self.noise[prefixes, width])


class _Beam:
    """One session's likeliest prefixes while they are drafted; the newest are all of one depth, the best first.

    In `cache` drafted rows lie behind the session's committed ones, the root's first, in the order in which they are computed.
    """

    def __init__(self, root: Root, size: int, cache: DraftCache) -> None:
        self.root, self._size, self._cache = root, size, cache
        self.paths: list[tuple[int, ...]] = [()]
        self._scores = np.zeros(1)
        self._visible = torch.ones(1, root.position + 1, dtype=torch.bool)
        self._described: list[tuple[list[tuple[int, ...]], _Rows]] = []

    @property
    def is_going(self) -> bool:
        """True while the newest prefixes are still to be described."""
        return len(self._described) < self.root.depths

    @property
    def token_ids(self) -> list[int]:
        """The last token of each newest prefix."""
        return [path[-1] if path else self.root.token_id for path in self.paths]

    @property
    def position(self) -> int:
        """Position of the newest prefixes' last tokens."""
        return self.root.position + len(self.paths[0])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What the newest prefixes attend to: the committed positions, their own path and themselves."""
        self._cache.write(self._visible.shape[1] - len(keys), keys, values)
        return self._cache.attend(queries, self._visible)

    def descend(self, rows: _Rows) -> list[int]:
        """Note what follows the newest prefixes, and make the likeliest of their children the newest; the parent of each,
        numbered among the old, if there is another depth to describe."""
        self._described.append((self.paths, rows))
        if not self.is_going:
            return []
        scores = self._scores[:, np.newaxis] + _branch_scores(rows, self.root.noise)
        best = np.argsort(-scores, axis=None, kind="stable")[: self._size]
        parents: list[int] = (best // scores.shape[1]).tolist()
        tokens = rows.token_ids.ravel()[best].tolist()
        self.paths = [(*self.paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        self._scores = scores.ravel()[best]
        self._visible = torch.cat([self._visible[parents], torch.eye(len(best), dtype=torch.bool)], dim=1)
        return parents

    def marginals(self) -> Marginals:
        """The best prefix of each depth as the depth's row, the others as conditional rows."""
        if not self._described:
            return Marginals.empty()
        best = [rows.part(slice(1)) for _, rows in self._described]
        others = [rows.part(slice(1, None)) for _, rows in self._described]
        return Marginals(
            np.concatenate([rows.token_ids for rows in (*best, *others)]),
            np.concatenate([rows.log_probs for rows in (*best, *others)]),
            tuple(path for paths, _ in self._described for path in paths[1:]),
        )


def _branch_scores(rows: _Rows, noise: SessionNoise) -> NDArray[np.float64]:
    """What the gateway ranks branches by: log-probs, or both weighted and normalised in each row."""
    if noise.is_silent:
        return rows.log_probs.astype(np.float64)
    scores = noise.weights.log_prob * rows.log_probs.astype(np.float64) + noise.weights.noise * rows.noise
    normalised: NDArray[np.float64] = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return normalised


def _noise_of(noise: SessionNoise, position: int, candidates: Tensor) -> Tensor:
    """Noise of some candidates, zeros without any."""
    row = noise.at(position)
    return torch.zeros(len(candidates), device=candidates.device) if row is None else row.to(candidates.device)[candidates]
