"""This file is the lean forward: Llama, Qwen2 and Qwen3 in few operations, over our KV store.

transformers' own modules are the general path and the reference that this one is tested against. Queries, keys and values
are one product, gate and up another. The rows of q and k are reordered at load so that the two halves of a rotary pair lie
side by side: the rotation is then one complex product, and scores of queries with keys do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from verify_service.attention.layout import StepLayout
from verify_service.attention.tree_attention import TreeAttention
from verify_service.engines.features import Computed, FeatureTaps
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.checkpoint import Checkpoint
from verify_service.engines.transformers.linear import (
    DenseEmbedding,
    DenseLinear,
    FineInt8Linear,
    Int8Embedding,
    Int8Linear,
    Linear,
)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's maps. `head_norm` [query and KV heads, head size] only if the model norms each query and key."""

    number: int
    attention_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Precision:
    """How weights are held and rows computed: `dtype` is that of the rows, norms and dense weights.

    `down` is how the MLP's last map is held, into which models put their largest activations.
    """

    dtype: torch.dtype
    linear: Callable[[Tensor, Tensor | None], Linear] = DenseLinear
    down: Callable[[Tensor, Tensor | None], Linear] = DenseLinear
    embedding: Callable[[Tensor], Callable[[Tensor], Tensor]] = DenseEmbedding


PRECISIONS = {
    "float32": Precision(torch.float32),
    "bfloat16": Precision(torch.bfloat16),
    "float16": Precision(torch.float16),
    "int8": Precision(torch.float32, Int8Linear, FineInt8Linear, Int8Embedding),
}


class LeanForward:
    """A model of a known architecture over a KV store: the ragged rows of a step in, the logits of the wanted rows out."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        precision: Precision,
        attention: TreeAttention,
        device: str,
        taps: FeatureTaps | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.store = attention.store
        self._architecture = architecture
        self._attention = attention
        self._taps = taps
        loader = _Loader(architecture, checkpoint, precision, self.device)
        self._layers = [loader.layer(number) for number in range(architecture.num_layers)]
        self._norm = loader.tensor("model.norm.weight")
        embedding = loader.mapped("model.embed_tokens.weight")
        self._embedding = precision.embedding(embedding)
        self._head = precision.linear(embedding if architecture.tied_head else loader.mapped("lm_head.weight"), None)
        self._frequencies = architecture.rotary_frequencies.to(self.device)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor) -> Tensor:
        """Run tokens int64 [rows] as laid out; float32 [wanted, vocabulary] of the rows numbered in `wanted` int64."""
        for rows in self._outputs(token_ids, layout):
            last = rows
        return self._logits(last[wanted])

    @torch.inference_mode()
    def compute(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor, tapped: Tensor) -> Computed:
        """The same, with the features of the rows numbered in `tapped` int64; the forward was made with taps."""
        assert self._taps is not None, "features are asked for only where the target taps them"
        layers = self._taps.projection.tapped_layers
        taps: dict[int, Tensor] = {}
        for number, rows in enumerate(self._outputs(token_ids, layout)):
            if number in layers:
                taps[number] = rows[tapped]
        return Computed(self._logits(rows[wanted]), self._taps.of_taps([taps[number] for number in layers]))

    def _outputs(self, token_ids: Tensor, layout: StepLayout) -> Iterator[Tensor]:
        """What each layer gives [rows, hidden], in order."""
        self._attention.begin(layout)
        angles = layout.positions[:, None].float() * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
        rows = self._embedding(token_ids)
        for layer in self._layers:
            rows = rows + self._attend(layer, rows, rotation)
            rows = rows + self._mlp(layer, rows)
            yield rows

    def _logits(self, rows: Tensor) -> Tensor:
        return self._head(self._normed(rows, self._norm)).float()

    def _attend(self, layer: _Layer, rows: Tensor, rotation: Tensor) -> Tensor:
        model = self._architecture
        num_rotated = model.num_heads + model.num_kv_heads
        heads = layer.qkv(self._normed(rows, layer.attention_norm)).view(len(rows), -1, model.head_size)
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = rms_norm(rotated, (model.head_size,), None, model.norm_epsilon) * layer.head_norm
        rotated = _rotate(rotated, rotation)
        attended = self._attention(
            layer.number, rotated[:, : model.num_heads], rotated[:, model.num_heads :], heads[:, num_rotated:]
        )
        return layer.output(attended.reshape(len(rows), -1))

    def _mlp(self, layer: _Layer, rows: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normed(rows, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm. In float32 by way of the length, in a third of the time of PyTorch's own on few rows."""
        size, epsilon = self._architecture.hidden_size, self._architecture.norm_epsilon
        if rows.dtype != torch.float32:
            return rms_norm(rows, (size,), weight, epsilon)
        mean_squares: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(size)
        normed: Tensor = (rows * mean_squares.add_(epsilon).rsqrt_()).mul_(weight)
        return normed


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of each head [rows, heads, size] by complex [rows, 1, size / 2]."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(heads.dtype)


class _Loader:
    """Makes the maps of a model from its checkpoint."""

    def __init__(self, architecture: Architecture, checkpoint: Checkpoint, precision: Precision, device: torch.device) -> None:
        self._architecture = architecture
        self._checkpoint = checkpoint
        self._precision = precision
        self._device = device

    def tensor(self, name: str) -> Tensor:
        """A tensor in the precision of the rows, in memory of its own."""
        return self.mapped(name).clone()

    def mapped(self, name: str) -> Tensor:
        """The same, mapped from its file where it is stored so; whoever keeps it keeps the whole file in memory."""
        return self._checkpoint.tensor(name).to(self._device, self._precision.dtype)

    def layer(self, number: int) -> _Layer:
        """All of one layer."""
        prefix = f"model.layers.{number}."
        return _Layer(
            number=number,
            attention_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._fused(self._precision.linear, f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")),
            head_norm=self._head_norm(f"{prefix}self_attn."),
            output=self._fused(self._precision.linear, f"{prefix}self_attn.", ("o_proj",)),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._fused(self._precision.linear, f"{prefix}mlp.", ("gate_proj", "up_proj")),
            down=self._fused(self._precision.down, f"{prefix}mlp.", ("down_proj",)),
        )

    def _fused(self, linear: Callable[[Tensor, Tensor | None], Linear], prefix: str, names: Sequence[str]) -> Linear:
        """One map for several that have the same input."""
        weight = torch.cat([self._ordered(name, f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in self._checkpoint
        bias = torch.cat([self._ordered(name, f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return linear(weight, bias)

    def _ordered(self, name: str, full_name: str) -> Tensor:
        tensor = self.mapped(full_name)
        return self._paired(tensor) if name in ("q_proj", "k_proj") else tensor

    def _paired(self, tensor: Tensor) -> Tensor:
        """Rows of whole heads [heads x size, ...] reordered from halves (first of all pairs, second of all) to pairs."""
        size = self._architecture.head_size
        return tensor.reshape(-1, 2, size // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _head_norm(self, prefix: str) -> Tensor | None:
        if f"{prefix}q_norm.weight" not in self._checkpoint:
            return None
        model = self._architecture
        query, key = (self._paired(self.tensor(f"{prefix}{name}.weight")) for name in ("q_norm", "k_norm"))
        return torch.cat((query.expand(model.num_heads, -1), key.expand(model.num_kv_heads, -1)))
