"""This file is context features on the target's side: tapped hidden states, fused by the drafter's own projection.

Fused here, a position costs one vector of the hidden size on the wire in place of one for each tapped layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from treewire.checkpoint import FeatureProjection, feature_projection, stored_tensors


class Computed(NamedTuple):
    """What a step computed: `logits` float32 [wanted, vocabulary], `features` float32 [tapped, size]."""

    logits: Tensor
    features: Tensor


class FeatureTaps:
    """Makes the features of rows whose hidden states the target has computed."""

    def __init__(self, projection: FeatureProjection, linear: Tensor, norm: Tensor) -> None:
        self.projection = projection
        self._linear = linear
        self._norm = norm

    @classmethod
    def load(cls, checkpoint: Path, *, num_layers: int, hidden_size: int, device: torch.device) -> FeatureTaps:
        """Of a drafter's checkpoint. Raises ValueError, with both values, if it was made for a target of another shape."""
        projection = feature_projection(checkpoint)
        if projection.feature_size != hidden_size:
            raise ValueError(f"the projection has size {projection.feature_size}, the target's hidden states {hidden_size}")
        if max(projection.tapped_layers) >= num_layers or min(projection.tapped_layers) < 0:
            raise ValueError(f"the projection taps layers {list(projection.tapped_layers)}, the target has {num_layers}")
        linear, norm = (_read(checkpoint, name, device) for name in projection.tensors)
        return cls(projection, linear, norm)

    def of_hidden_states(self, hidden_states: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Features float32 [rows, size] of the rows numbered in `rows` int64, from what transformers calls hidden states:
        the embedding's output, then each layer's, [1, positions, hidden]. The output of layer i is entry i + 1."""
        return self.of_taps([hidden_states[layer + 1][0, rows] for layer in self.projection.tapped_layers])

    @torch.inference_mode()
    def of_taps(self, taps: Sequence[Tensor]) -> Tensor:
        """Features float32 [rows, size] of the outputs [rows, hidden] of the tapped layers, in their order."""
        size, epsilon = self.projection.feature_size, self.projection.rms_epsilon
        outputs = [tap.float() for tap in taps]
        if self.projection.normalize_taps:
            outputs = [functional.rms_norm(output, (size,), eps=epsilon) for output in outputs]
        fused = functional.linear(torch.cat(outputs, dim=-1), self._linear)
        return functional.rms_norm(fused, (size,), self._norm, epsilon)


def _read(checkpoint: Path, name: str, device: torch.device) -> Tensor:
    with safe_open(stored_tensors(checkpoint)[name].path, framework="pt", device=str(device)) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor.float()
