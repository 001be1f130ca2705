"""This file is the target's forward: the ragged rows of a step in, the logits of the wanted rows out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewire.kv.store import KvStore
from verify_service.attention.layout import StepLayout
from verify_service.attention.tree_attention import LayerCall, TreeAttention
from verify_service.engines.features import Computed, FeatureTaps
from verify_service.engines.transformers.attention_interface import bind


class TreeForward:
    """A transformers model whose attention reads and writes a KV store of ours. Its own cache is never used."""

    def __init__(self, model: PreTrainedModel, store: KvStore, taps: FeatureTaps | None = None) -> None:
        self.store = store
        self._model = model
        self._taps = taps
        self._attention = TreeAttention(store)
        bind(model, self._attention)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self._model.device)

    @property
    def calls(self) -> Sequence[LayerCall]:
        """The attention calls of the last step, in order."""
        return self._attention.calls

    @property
    def has_taps(self) -> bool:
        """Whether it makes features."""
        return self._taps is not None

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor) -> Tensor:
        """Run tokens int64 [rows] as laid out; float32 [wanted, vocabulary] of the rows numbered in `wanted` int64."""
        self._attention.begin(layout)
        output = self._model(
            input_ids=token_ids[None], position_ids=layout.positions[None], use_cache=False, logits_to_keep=wanted
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def compute(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor, tapped: Tensor) -> Computed:
        """The same, with the features of the rows numbered in `tapped` int64; the forward was made with taps."""
        assert self._taps is not None, "features are asked for only where the target taps them"
        self._attention.begin(layout)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            output_hidden_states=True,
        )
        return Computed(output.logits[0].float(), self._taps.of_hidden_states(output.hidden_states, tapped))
