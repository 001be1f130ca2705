"""This file is the lean forward: Llama, Qwen2 and Qwen3 in few operations, over our KV store.

transformers' own modules are the general path and the reference that this one is tested against. Queries, keys and values
are one product, gate and up another. The rows of q and k are reordered at load so that the two halves of a rotary pair lie
side by side: the rotation is then one complex product, and scores of queries with keys do not change.

Of several ranks each has whole heads and spans of the MLP and of the vocabulary. What they compute is added up twice a layer
and once after the embedding; the rows between are the same on all of them. Of the logits each has its span of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from treewire.int8 import Int8Linear
from verify_service.attention.bucket import Heads
from verify_service.attention.layout import StepLayout
from verify_service.attention.tree_attention import TreeAttention
from verify_service.engines.features import Computed, FeatureTaps
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.checkpoint import Weights
from verify_service.engines.transformers.group import Alone, Group
from verify_service.engines.transformers.linear import (
    DenseEmbedding,
    DenseLinear,
    FineInt8Linear,
    Int8Embedding,
    Linear,
)
from verify_service.engines.transformers.shard import Shard


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


Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer: writes the rows' keys and values, and attends with their queries, all [rows, heads, size]."""


class LeanForward:
    """A model of a known architecture over a KV store: the ragged rows of a step in, the logits of the wanted rows out."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Weights,
        precision: Precision,
        attention: TreeAttention,
        device: str,
        taps: FeatureTaps | None = None,
        shard: Shard = Shard(),  # noqa: B008 - frozen
        group: Group = Alone(),  # noqa: B008 - without state
    ) -> None:
        self.device = torch.device(device)
        self.store = attention.store
        self.vocabulary = shard.span(architecture.vocabulary_size)
        self._architecture = shard.of(architecture)
        self._attention = attention
        self._taps = taps
        self._shard = shard
        self._group = group
        self.dtype = precision.dtype
        loader = _Loader(architecture, checkpoint, precision, self.device, shard)
        self._layers = [loader.layer(number) for number in range(architecture.num_layers)]
        self._norm = loader.tensor("model.norm.weight")
        embedding = loader.rows("model.embed_tokens.weight")
        self._embedding = precision.embedding(embedding)
        self._head = precision.linear(embedding if architecture.tied_head else loader.rows("lm_head.weight"), None)
        self._frequencies = architecture.rotary_frequencies.to(self.device)
        self.weight_bytes = loader.num_bytes  # and a head tied to the embedding is a copy of it
        self.weight_bytes += embedding.numel() * precision.dtype.itemsize if architecture.tied_head else 0

    @property
    def is_whole(self) -> bool:
        """Whether its logits are of the whole vocabulary, there being no other rank."""
        return self._shard.is_whole

    @property
    def heads(self) -> Heads:
        """This rank's."""
        return Heads(self._architecture.num_heads, self._architecture.num_kv_heads, self._architecture.head_size)

    @property
    def has_taps(self) -> bool:
        """Whether it makes features."""
        return self._taps is not None

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor) -> Tensor:
        """Run tokens int64 [rows] as laid out; float32 [wanted, vocabulary] of the rows numbered in `wanted` int64.

        Of several ranks each answers for its `vocabulary`.
        """
        self._attention.begin(layout)
        for rows in self._outputs(token_ids, layout.positions, self._attention):
            last = rows
        return self.head(last[wanted])

    @torch.inference_mode()
    def compute(self, token_ids: Tensor, layout: StepLayout, wanted: Tensor, tapped: Tensor) -> Computed:
        """The same, with the features of the rows numbered in `tapped` int64; the forward was made with taps."""
        assert self._taps is not None, "features are asked for only where the target taps them"
        self._attention.begin(layout)
        rows, taps = self._tapped(token_ids, layout.positions, self._attention)
        return Computed(self.head(rows[wanted]), self._taps.of_taps([tap[tapped] for tap in taps]))

    def rows(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Run tokens int64 [rows] at their positions; the last layer's rows, and the features of all if it has taps."""
        rows, taps = self._tapped(token_ids, positions, attention)
        return rows, self._taps.of_taps(taps) if self._taps is not None else None

    def _tapped(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, list[Tensor]]:
        """The last layer's rows, and those of the tapped layers in their order."""
        layers = self._taps.projection.tapped_layers if self._taps is not None else ()
        taps: dict[int, Tensor] = {}
        for number, rows in enumerate(self._outputs(token_ids, positions, attention)):
            last = rows
            if number in layers:
                taps[number] = rows
        return last, [taps[number] for number in layers]

    def _outputs(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Iterator[Tensor]:
        """What each layer gives [rows, hidden], in order."""
        angles = positions[:, None].float() * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
        rows = self._embed(token_ids)
        for layer in self._layers:
            rows = rows + self._group.sum(self._attend(layer, rows, rotation, attention))
            rows = rows + self._group.sum(self._mlp(layer, rows))
            yield rows

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, each from the rank that has it."""
        if self._shard.is_whole:
            return self._embedding(token_ids)
        own = token_ids - self.vocabulary.start
        num_own = self.vocabulary.stop - self.vocabulary.start
        is_other = (own < 0) | (own >= num_own)
        return self._group.sum(self._embedding(own.clamp(0, num_own - 1)).masked_fill_(is_other[:, None], 0.0))

    def head(self, rows: Tensor) -> Tensor:
        """Logits of rows of the last layer, float32."""
        return self._head(self._normed(rows, self._norm)).float()

    def _attend(self, layer: _Layer, rows: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        model = self._architecture
        num_rotated = model.num_heads + model.num_kv_heads
        heads = layer.qkv(self._normed(rows, layer.attention_norm)).view(len(rows), -1, model.head_size)
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = rms_norm(rotated, (model.head_size,), None, model.norm_epsilon) * layer.head_norm
        rotated = _rotate(rotated, rotation)
        attended = attention(layer.number, rotated[:, : model.num_heads], rotated[:, model.num_heads :], heads[:, num_rotated:])
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
    """Makes the maps of a model, or of one rank's share of it, from its checkpoint."""

    def __init__(
        self, architecture: Architecture, checkpoint: Weights, precision: Precision, device: torch.device, shard: Shard
    ) -> None:
        self._architecture = architecture
        self._checkpoint = checkpoint
        self._precision = precision
        self._device = device
        self._shard = shard
        self._seen: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what was read, in the precision of the rows: what dense weights take."""
        return sum(self._seen.values()) * self._precision.dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        """A tensor that every rank has whole, in memory of its own."""
        return self._converted(name, self._checkpoint.tensor(name)).clone()

    def rows(self, name: str, unit: int = 1) -> Tensor:
        """This rank's rows of a tensor, in units that stay together.

        Of a model that is whole the tensor is mapped from its file if it is stored so: whoever keeps it keeps the whole file.
        """
        if self._shard.is_whole:
            return self._converted(name, self._checkpoint.tensor(name))
        span = self._shard.span(self._checkpoint.shape(name)[0], unit)
        return self._converted(name, self._checkpoint.part(name, span))

    def layer(self, number: int) -> _Layer:
        """All of one layer."""
        prefix = f"model.layers.{number}."
        return _Layer(
            number=number,
            attention_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._fused(f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")),
            head_norm=self._head_norm(f"{prefix}self_attn."),
            output=self._reduced(self._precision.linear, f"{prefix}self_attn.o_proj", self._unit("q_proj")),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._fused(f"{prefix}mlp.", ("gate_proj", "up_proj")),
            down=self._reduced(self._precision.down, f"{prefix}mlp.down_proj", 1),
        )

    def _unit(self, name: str) -> int:
        """Rows of a map that stay on one rank: a KV head's own, and those of the query heads that read it."""
        model = self._architecture
        num_heads = {"q_proj": model.num_heads // model.num_kv_heads, "k_proj": 1, "v_proj": 1}
        return num_heads[name] * model.head_size if name in num_heads else 1

    def _fused(self, prefix: str, names: Sequence[str]) -> Linear:
        """One map for several that have the same input; a rank has some of the outputs of each."""
        weight = torch.cat([self._ordered(name, f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in self._checkpoint
        bias = torch.cat([self._ordered(name, f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return self._precision.linear(weight, bias)

    def _reduced(self, linear: Callable[[Tensor, Tensor | None], Linear], name: str, unit: int) -> Linear:
        """A map whose input is what the ranks have computed, each its span, and whose outputs have to be added up."""
        full_name = f"{name}.weight"
        if self._shard.is_whole:
            weight = self._converted(full_name, self._checkpoint.tensor(full_name))
        else:
            span = self._shard.span(self._checkpoint.shape(full_name)[1], unit)
            weight = self._converted(full_name, self._checkpoint.part(full_name, span, dim=1))
        has_bias = f"{name}.bias" in self._checkpoint and self._shard.is_first
        return linear(weight, self.tensor(f"{name}.bias") if has_bias else None)

    def _ordered(self, name: str, full_name: str) -> Tensor:
        tensor = self.rows(full_name, self._unit(name))
        return self._paired(tensor) if name in ("q_proj", "k_proj") else tensor

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        self._seen[name] = tensor.numel()
        return tensor.to(self._device, self._precision.dtype)

    def _paired(self, tensor: Tensor) -> Tensor:
        """Rows of whole heads [heads x size, ...] reordered from halves (first of all pairs, second of all) to pairs."""
        size = self._architecture.head_size
        return tensor.reshape(-1, 2, size // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _head_norm(self, prefix: str) -> Tensor | None:
        if f"{prefix}q_norm.weight" not in self._checkpoint:
            return None
        model = self._shard.of(self._architecture)
        query, key = (self._paired(self.tensor(f"{prefix}{name}.weight")) for name in ("q_norm", "k_norm"))
        return torch.cat((query.expand(model.num_heads, -1), key.expand(model.num_kv_heads, -1)))
