"""This file is the block drafter as a network of sessions: one non-causal block a round for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.engines.dflash.model import BlockIngestion, DFlashDrafter, PagedBlockCache, commit_features, draft_blocks
from draft_service.engines.feature_drafter import Committed, Root
from draft_service.engines.torch_ranking import rank
from treewire.core.tree import Marginals
from treewire.kv.rows import Slots
from treewire.kv.store import KvStore


class BlockNetwork:
    """`FeatureNetwork` over DFlash: committed features become keys and values; a round is one block forward."""

    def __init__(self, model: DFlashDrafter, store: KvStore) -> None:
        self._model = model.eval()
        self._store = store

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._model.embedding.device

    @property
    def candidate_ids(self) -> Tensor | None:
        """Every token."""
        return None

    def take_in(self, committed: Sequence[Committed]) -> None:
        """Keys and values of these features in every draft layer."""
        committed = [item for item in committed if len(item.features)]
        features = [item.features.to(self._model.fc.weight.dtype) for item in committed]
        commit_features(self._model, [self._cache(item.position, item.slots) for item in committed], features)

    def draft(self, roots: Sequence[Root]) -> Sequence[Marginals]:
        """One block for each root; depth d is row d of its block."""
        rows = [(root, depth) for root in roots for depth in range(1, root.depths + 1)]
        if not rows:
            return [Marginals.empty() for _ in roots]
        nothing = self._model.fc.weight.new_empty(0, self._model.config.hidden_size)
        caches = [self._cache(root.position, root.slots) for root in roots]
        logits = draft_blocks(
            self._model,
            [BlockIngestion(cache, nothing, root.token_id) for root, cache in zip(roots, caches, strict=True)],
        )
        ranked = rank(
            torch.cat([block[: root.depths] for root, block in zip(roots, logits, strict=True)]),
            [root.noise for root, _ in rows],
            [root.position + depth for root, depth in rows],
            max(root.width for root in roots),
        )
        token_ids, log_probs = ranked.token_ids.int().cpu().numpy(), ranked.log_probs.cpu().numpy()
        marginals, start = [], 0
        for root in roots:
            part = slice(start, start + root.depths)
            marginals.append(Marginals(token_ids[part, : root.width], log_probs[part, : root.width]))
            start += root.depths
        return marginals

    def _cache(self, length: int, slots: Slots) -> PagedBlockCache:
        return PagedBlockCache(self._store, length, torch.from_numpy(slots).to(self.device))
