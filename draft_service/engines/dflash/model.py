"""This file is the block drafter: DFlash (arXiv 2602.06036), in the tensor layout of z-lab's checkpoints.

With t_i the tapped hidden states of the target at position i, feature_i = hidden_norm(fc(concat of t_i)). A round of a sequence
x_0 .. x_n, x_n the bonus token, has the features of 0 .. n-1 and one block of rows at positions n .. n + block - 1: the
target's embedding of x_n, then of the mask token. In every layer the features make keys and values (no input norm), ahead of
those of the block's own rows, which see each other in both directions; the rest of a layer is Qwen3's. Row j > 0 of norm(last
layer), through the target's output head, guesses x_{n+j}: block - 1 guesses.

Tensors (H hidden size, T taps, D head dimension, Q and K query and KV heads, F MLP width): `fc.weight` [H, T H], taps in the
order of `target_layer_ids`; `hidden_norm.weight`, `norm.weight` [H]; and of each layer i, below `layers.i.`: `self_attn.q_proj.
weight` [Q D, H], `k_proj`, `v_proj` [K D, H], `o_proj` [H, Q D], `q_norm`, `k_norm` [D], `mlp.gate_proj`, `mlp.up_proj` [F, H],
`mlp.down_proj` [H, F], `input_layernorm`, `post_attention_layernorm` [H]. Embedding and output head are the target's.

Where z-lab's config asks for it: layers whose rows see a sliding window and, in such layers, none behind them; rotary scaling
(YaRN, Llama 3); biases; drafters of Llama's type, whose heads have no norms; scaled embeddings and capped logits.

One extension, absent from z-lab's files and false there: `normalize_taps`, each tap divided by its root mean square before fc,
which targets with massive activations need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.engines.rotary import Rotary
from treewire.checkpoint import architecture_of, tapped_layers_of
from treewire.kv.store import KvStore

_DEFAULT_BLOCK_SIZE = 16
_HEADS_HAVE_NORMS = {"qwen3": True, "llama": False}
_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_INITIAL_CAPACITY = 256


@dataclass(frozen=True)
class Sight:
    """Which positions a row of a layer sees: all, or those not after its own, or those less than `window` away."""

    is_causal: bool = False
    window: int | None = None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """What rows at positions int64 [n] see of positions int64 [m], bool [n, m]; None if that is everything."""
        if not self.is_causal and self.window is None:
            return None
        distance = queries[:, None] - keys
        visible = torch.ones_like(distance, dtype=torch.bool) if not self.is_causal else distance >= 0
        return visible if self.window is None else visible & (distance.abs() < self.window)


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a block drafter. Raises ValueError for a block without a guess, no taps or heads that do not divide."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_epsilon: float
    block_size: int
    mask_token_id: int
    tapped_layers: tuple[int, ...]
    normalize_taps: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    sights: tuple[Sight, ...] = ()
    heads_have_norms: bool = True
    attention_has_bias: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block size is {self.block_size}, it must be at least 2: the bonus token and one guess")
        if not self.tapped_layers:
            raise ValueError("a block drafter taps at least one layer of its target, this one none")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")

    @property
    def horizon(self) -> int:
        """Guesses in a block."""
        return self.block_size - 1

    @property
    def rotary(self) -> Rotary:
        """Position embedding of every layer."""
        if self.rope_scaling is None:
            return Rotary.plain(self.head_dim, self.rope_theta)
        return Rotary.scaled(self.head_dim, self.rope_scaling)

    def sight(self, layer: int) -> Sight:
        """What the rows of a layer see; without `sights` everything."""
        return self.sights[layer] if self.sights else Sight()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DFlashConfig:
        """The shape that a z-lab `config.json` describes. Raises ValueError for what this engine does not draft."""
        _check_kind(values)
        own = values.get("dflash_config", {})
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        rope = _rope_of(values)
        return cls(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=head_dim,
            intermediate_size=values["intermediate_size"],
            rope_theta=float(rope["rope_theta"]),
            rms_epsilon=values["rms_norm_eps"],
            block_size=int(own.get("block_size", values.get("block_size", _DEFAULT_BLOCK_SIZE))),
            mask_token_id=own.get("mask_token_id", values.get("mask_token_id")),
            tapped_layers=tapped_layers_of(values),
            normalize_taps=own.get("normalize_taps", False),
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            sights=_sights_of(values),
            heads_have_norms=_HEADS_HAVE_NORMS[values["model_type"]],
            attention_has_bias=values.get("attention_bias", False),
            embedding_scale=float(own.get("input_embedding_scale", values.get("input_embedding_scale", 1.0))),
            output_multiplier=float(own.get("output_multiplier", values.get("output_multiplier", 1.0))),
            logit_cap=own.get("final_logit_softcapping", values.get("final_logit_softcapping")) or None,
        )

    def to_json(self) -> dict[str, Any]:
        """The same as a z-lab `config.json`."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_epsilon,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.tapped_layers),
                "normalize_taps": self.normalize_taps,
            },
        }


def _check_kind(values: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, for drafters of another kind."""
    architecture_of(values)
    if values["model_type"] not in _HEADS_HAVE_NORMS:
        raise ValueError(f"model_type is {values['model_type']!r}, block drafters are {' or '.join(_HEADS_HAVE_NORMS)}")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {values['hidden_act']!r}, block drafters have 'silu'")
    unknown = set(values.get("layer_types") or ()) - set(_LAYER_TYPES)
    if unknown:
        raise ValueError(f"layers of type {', '.join(sorted(unknown))}; block drafters have {' and '.join(_LAYER_TYPES)}")


def _rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters with the names of today's configs, whichever a config has."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", values.get("rope_theta"))
    rope["max_position_embeddings"] = values.get("max_position_embeddings")
    return rope


def _sights_of(values: Mapping[str, Any]) -> tuple[Sight, ...]:
    """What each layer's rows see: as in z-lab's own code, a layer with a sliding window is causal unless the config says."""
    types = values.get("layer_types") or [_LAYER_TYPES[0]] * values["num_hidden_layers"]
    causal = values.get("is_causal")
    return tuple(
        Sight(
            is_causal=kind == _SLIDING if causal is None else bool(causal),
            window=values["sliding_window"] if kind == _SLIDING else None,
        )
        for kind in types
    )


class DFlashAttention(nn.Module):
    """Projections of one layer's attention; who attends to whom is the caller's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim, self.rotary = config.head_dim, config.rotary
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_has_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_has_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_has_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_has_bias)
        self.q_norm, self.k_norm = (
            _Norm(config.head_dim, eps=config.rms_epsilon) if config.heads_have_norms else nn.Identity() for _ in range(2)
        )

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., heads, D] of rows [..., H] at positions [...]."""
        return self.rotary.rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), positions)

    def keys_values(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [..., KV heads, D] each, of features or of normed rows [..., H] at positions [...]."""
        heads = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(rows).unflatten(-1, (-1, self.head_dim)).to(heads.dtype)
        return self.rotary.rotate(heads, positions), values


class DFlashMlp(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., H] to what they add."""
        added: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return added


class DFlashLayer(nn.Module):
    """One draft layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, eps=config.rms_epsilon)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, eps=config.rms_epsilon)
        self.mlp = DFlashMlp(config)

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., H] of its input rows and what their heads attended to [..., heads, D]."""
        rows = rows + self.self_attn.o_proj(attended.flatten(-2))
        finished: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return finished


class DFlashDrafter(nn.Module):
    """The trained part, plus the target's embedding and output head [vocabulary, H], both frozen."""

    embedding: Tensor
    head: Tensor

    def __init__(self, config: DFlashConfig, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.hidden_size * len(config.tapped_layers), config.hidden_size, bias=False)
        self.hidden_norm = _Norm(config.hidden_size, eps=config.rms_epsilon)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = _Norm(config.hidden_size, eps=config.rms_epsilon)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)

    @property
    def draft_layers(self) -> Sequence[DFlashLayer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def features(self, taps: Tensor) -> Tensor:
        """Fused features [..., H] of tapped hidden states [..., T, H]: what the verify side computes."""
        if self.config.normalize_taps:
            taps = functional.rms_norm(taps, taps.shape[-1:], eps=self.config.rms_epsilon)
        fused: Tensor = self.hidden_norm(self.fc(taps.flatten(-2)))
        return fused

    def block_rows(self, bonus_ids: Tensor) -> Tensor:
        """Rows [..., block, H] that enter the first layer, for bonus tokens int64 [...]."""
        masks = bonus_ids.new_full((*bonus_ids.shape, self.config.horizon), self.config.mask_token_id)
        rows: Tensor = self.embedding[torch.cat([bonus_ids[..., None], masks], dim=-1)]
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the last layer's rows."""
        logits = functional.linear(self.norm(outputs), self.head).float() * self.config.output_multiplier
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class BlockCache(Protocol):
    """One sequence's keys and values of committed positions in every layer; `length` counts them."""

    length: int

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, KV heads, D] of the first positions after `length`, which the caller moves on."""

    def attend(self, layer: int, sight: Sight, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What a block's queries [block, heads, D] attend to, of every committed position and the whole block."""


class DFlashCache:
    """`BlockCache` in one piece, [2, KV heads, positions, D] for each layer."""

    def __init__(self, config: DFlashConfig, like: Tensor | None = None) -> None:
        """An empty cache; `like` has its type and device."""
        self.length = 0
        shape = (2, config.num_kv_heads, _INITIAL_CAPACITY, config.head_dim)
        self._stored = [torch.empty(shape) if like is None else like.new_empty(shape) for _ in range(config.num_layers)]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, KV heads, D] of the first positions after `length`, which the caller moves on."""
        stored, stop = self._stored[layer], self.length + len(keys)
        if stop > stored.shape[2]:
            larger = stored.new_empty(*stored.shape[:2], 2 * stop, stored.shape[3])
            larger[:, :, : self.length] = stored[:, :, : self.length]
            self._stored[layer] = stored = larger
        stored[0, :, self.length : stop] = keys.transpose(0, 1)
        stored[1, :, self.length : stop] = values.transpose(0, 1)

    def attend(self, layer: int, sight: Sight, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What a block's queries [block, heads, D] attend to, of every committed position and the whole block."""
        own = torch.stack([keys, values]).transpose(1, 2)
        return _attend_block(sight, queries, torch.cat([self._stored[layer][:, :, : self.length], own], dim=2))


class PagedBlockCache:
    """`BlockCache` over slots of a store, for one call.

    `slots` int64 are those of the first `length` positions for `attend`, those after them for `extend`.
    """

    def __init__(self, store: KvStore, length: int, slots: Tensor) -> None:
        self.length = length
        self._store = store
        self._slots = slots

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, KV heads, D] into the slots."""
        self._store.write(layer, self._slots, keys, values)

    def attend(self, layer: int, sight: Sight, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What a block's queries [block, heads, D] attend to, of every committed position and the whole block."""
        both = keys.new_empty(2, keys.shape[1], self.length + len(keys), keys.shape[2])
        if self.length:
            for part, stored in zip(both, self._store.read(layer, self._slots), strict=True):
                part[:, : self.length] = stored.transpose(0, 1)
        both[:, :, self.length :] = torch.stack([keys, values]).transpose(1, 2)
        return _attend_block(sight, queries, both)


def _attend_block(sight: Sight, queries: Tensor, both: Tensor) -> Tensor:
    """What a block's queries [block, heads, D] attend to, of keys and values [2, KV heads, positions, D] that end with its own;
    [block, heads, D]."""
    positions = torch.arange(both.shape[2], device=queries.device)
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        both[0][None],
        both[1][None],
        attn_mask=sight.mask(positions[-len(queries) :], positions),
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class BlockIngestion:
    """What a session commits before a draft: the fused features float [n, H] of the positions since its last draft, and the
    bonus token that follows them. The bonus token's own features do not exist yet."""

    cache: BlockCache
    features: Tensor
    bonus_id: int


@torch.inference_mode()
def commit_features(drafter: DFlashDrafter, caches: Sequence[BlockCache], features: Sequence[Tensor]) -> None:
    """Put the next positions' features, float [n, H] each, into the sessions' caches: the only work of a committed position."""
    counts = [len(rows) for rows in features]
    if not any(counts):
        return
    rows = torch.cat(list(features))
    positions = torch.cat(
        [torch.arange(cache.length, cache.length + count) for cache, count in zip(caches, counts, strict=True)]
    ).to(rows.device)
    for number, layer in enumerate(drafter.draft_layers):
        context = layer.self_attn.keys_values(rows, positions)
        for cache, keys, values in zip(caches, *(torch.split(part, counts) for part in context), strict=True):
            cache.extend(number, keys, values)
    for cache, count in zip(caches, counts, strict=True):
        cache.length += count


@torch.inference_mode()
def draft_blocks(drafter: DFlashDrafter, ingestions: Sequence[BlockIngestion]) -> Tensor:
    """Commit features to the sessions' caches and draft one block each: logits [sessions, block - 1, vocabulary]."""
    caches = [ingestion.cache for ingestion in ingestions]
    commit_features(drafter, caches, [ingestion.features for ingestion in ingestions])
    device = drafter.embedding.device
    lengths = torch.tensor([cache.length for cache in caches], device=device)
    positions = lengths[:, None] + torch.arange(drafter.config.block_size, device=device)
    rows = drafter.block_rows(torch.tensor([ingestion.bonus_id for ingestion in ingestions], device=device))
    for number, layer in enumerate(drafter.draft_layers):
        normed, sight = layer.input_layernorm(rows), drafter.config.sight(number)
        queries, (keys, values) = layer.self_attn.queries(normed, positions), layer.self_attn.keys_values(normed, positions)
        attended = [cache.attend(number, sight, *parts) for cache, *parts in zip(caches, queries, keys, values, strict=True)]
        rows = layer.finish(rows, torch.stack(attended))
    return drafter.logits(rows[:, 1:])


class _Norm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, whatever autocast made of the input."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.to(self.weight.dtype))
