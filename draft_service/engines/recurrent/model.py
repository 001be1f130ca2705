"""This file is the recurrent drafter: one decoder layer over fused features of the target, which reads its own guesses back.

Kin to EAGLE-3 (Li et al., arXiv 2503.01840). With x_i the token and t_i the tapped hidden states at position i:

    feature_i = fuse_norm(fuse(concat of t_i, each divided by its root mean square))       one vector of the hidden size
    row_i     = embed(embedding_norm(E[x_i])) + carry(feature_{i-1})                        feature_{-1} is 0
    out_i     = row_i through one decoder layer (causal attention, rotary positions, gated MLP), Llama's conventions
    logits_i  = candidates' rows of the target's output head times output_norm(out_i):      guesses x_{i+1}

A committed position has its true feature. A drafted position i takes carry_norm(out_{i-1}) in the place of feature_{i-1}. So a
round of a sequence x_0 .. x_n, x_n the bonus token, needs the features of 0 .. n-1: exactly what the target has computed.

Tensors of `model.safetensors` (H hidden size, T taps, D head dimension, Q and K query and KV heads, F MLP width, C candidates):
`fuse.weight` [H, T H], taps in the order of `tapped_layers`; `fuse_norm.weight`, `embedding_norm.weight`, `carry_norm.weight`,
`output_norm.weight`, `attention_norm.weight`, `mlp_norm.weight` [H]; `embed.weight`, `carry.weight` [H, H]; `query.weight`
[Q D, H]; `key.weight`, `value.weight` [K D, H]; `attention_output.weight` [H, Q D]; `gate.weight`, `up.weight` [F, H];
`down.weight` [H, F]; `candidate_ids` int32 [C], ascending. Every linear is bias-free, as nn.Linear stores it. E and the output
head are the target's and not in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.engines.rotary import Rotary
from draft_service.engines.weight_only import drafting_linear

ARCHITECTURE = "treewire-recurrent"


@dataclass(frozen=True)
class RecurrentConfig:
    """The shape of a recurrent drafter. Raises ValueError if heads do not divide or nothing is tapped."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_epsilon: float
    tapped_layers: tuple[int, ...]
    num_candidates: int
    horizon: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if not self.tapped_layers:
            raise ValueError("a recurrent drafter taps at least one layer of its target, this one none")
        if self.horizon < 1 or self.num_candidates < 1:
            raise ValueError(f"horizon is {self.horizon} and candidates {self.num_candidates}, both are at least 1")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecurrentConfig:
        """The shape that a `config.json` describes; other keys are ignored. Raises ValueError for another architecture."""
        if values.get("architecture") != ARCHITECTURE:
            raise ValueError(f"architecture is {values.get('architecture')!r}, not {ARCHITECTURE!r}")
        known = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "tapped_layers": tuple(known["tapped_layers"])})


class AttentionInputs(NamedTuple):
    """What rows bring to attention, rotated: `queries` [..., heads, D], `keys` and `values` [..., KV heads, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class RecurrentDrafter(nn.Module):
    """The trained part, plus the target's embedding and the candidates' rows of its output head, both frozen.

    `embedding` [vocabulary, H] and `head` [vocabulary, H] are the target's; `candidate_ids` int64 [C] are the tokens that the
    drafter can guess.
    """

    candidate_ids: Tensor
    embedding: Tensor

    def __init__(self, config: RecurrentConfig, embedding: Tensor, head: Tensor, candidate_ids: Tensor) -> None:
        super().__init__()
        hidden, queries = config.hidden_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.config = config
        self.fuse = _linear(hidden * len(config.tapped_layers), hidden)
        self.fuse_norm = _norm(config)
        self.embedding_norm = _norm(config)
        self.carry_norm = _norm(config)
        self.output_norm = _norm(config)
        self.embed = _linear(hidden, hidden)
        self.carry = _linear(hidden, hidden)
        self.attention_norm = _norm(config)
        self.query, self.key, self.value = _linear(hidden, queries), _linear(hidden, keys), _linear(hidden, keys)
        self.attention_output = _linear(queries, hidden)
        self.mlp_norm = _norm(config)
        self.gate, self.up = _linear(hidden, config.intermediate_size), _linear(hidden, config.intermediate_size)
        self.down = _linear(config.intermediate_size, hidden)
        self.register_buffer("candidate_ids", candidate_ids)
        self.register_buffer("embedding", embedding, persistent=False)
        self.head: nn.Module = _FrozenLinear(head[candidate_ids])
        self.projections: nn.Module | None = None  # query, key and value in one, and gate and up, in a drafter for drafting
        self.gate_and_up: nn.Module | None = None
        self._rotary = Rotary.plain(config.head_dim, config.rope_theta)

    @property
    def candidate_head(self) -> Tensor:
        """The candidates' rows of the target's output head, [C, H]. Raises TypeError once the drafter is for drafting."""
        if not isinstance(self.head, _FrozenLinear):
            raise TypeError("a drafter that drafts has its head in int8")
        return self.head.weight

    def features(self, taps: Tensor) -> Tensor:
        """Fused features [..., H] of tapped hidden states [..., T, H] of any scale: what the verify side computes."""
        unit = functional.rms_norm(taps, taps.shape[-1:], eps=self.config.rms_epsilon)
        fused: Tensor = self.fuse_norm(self.fuse(unit.flatten(-2)))
        return fused

    def rows(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Rows [..., H] that enter the layer, of tokens int64 [...] and the features [..., H] of the positions before them."""
        row: Tensor = self.embed(self.embedding_norm(self.embedding[token_ids])) + self.carry(features)
        return row.to(features.dtype)

    def attention_inputs(self, rows: Tensor, positions: Tensor) -> AttentionInputs:
        """Queries, keys and values of rows [..., H] at positions int64 [...] (broadcast)."""
        projected = self._projected(self.attention_norm(rows)).to(rows.dtype)
        heads = projected.view(*projected.shape[:-1], -1, self.config.head_dim)
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        turned, values = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], -2)
        queries, keys = torch.split(self._rotary.rotate(turned, positions), [num_heads, num_kv_heads], -2)
        return AttentionInputs(queries, keys, values)

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., H] of its input rows and what their heads attended to [..., heads, D]."""
        rows = rows + self.attention_output(attended.flatten(-2))
        gate, up = self._gated(self.mlp_norm(rows))
        finished: Tensor = rows + self.down(functional.silu(gate) * up)
        return finished

    def carried(self, outputs: Tensor) -> Tensor:
        """What stands in for the feature of a drafted position, of the output that guessed it."""
        carried: Tensor = self.carry_norm(outputs)
        return carried

    def head_inputs(self, outputs: Tensor) -> Tensor:
        """What the candidates' head reads."""
        normed: Tensor = self.output_norm(outputs)
        return normed

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., C] of the candidates; every other token counts as impossible."""
        logits: Tensor = self.head(self.head_inputs(outputs))
        return logits

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log-probs [..., C] over the candidates."""
        return self.logits(outputs).float().log_softmax(-1)

    def for_drafting(self) -> RecurrentDrafter:
        """This drafter, its matrices in int8 from now on, which can no longer be trained; `fuse` and the norms stay float32.

        A draft reads every matrix once a depth, and memory is what bounds it, then the number of calls: matrices that read the
        same rows become one.
        """
        for joined, names in (("projections", ("query", "key", "value")), ("gate_and_up", ("gate", "up"))):
            setattr(self, joined, drafting_linear(torch.cat([getattr(self, name).weight.detach() for name in names])))
            for name in names:
                delattr(self, name)
        for name in ("embed", "carry", "attention_output", "down", "head"):
            setattr(self, name, drafting_linear(getattr(self, name).weight.detach()))
        return self

    def _projected(self, normed: Tensor) -> Tensor:
        """What the heads read, queries, keys and values one after the other: [..., (Q + 2 K) D]."""
        if self.projections is not None:
            projected: Tensor = self.projections(normed)
            return projected
        return torch.cat([self.query(normed), self.key(normed), self.value(normed)], -1)

    def _gated(self, normed: Tensor) -> Sequence[Tensor]:
        """The gate and what it is for, [..., F] each."""
        if self.gate_and_up is not None:
            return self.gate_and_up(normed).chunk(2, -1)  # type: ignore[no-any-return]
        return self.gate(normed), self.up(normed)


class DraftCache:
    """One sequence's keys and values in one piece: of committed positions, and behind them those of a round's drafted nodes."""

    def __init__(self, config: RecurrentConfig, capacity: int = 256) -> None:
        self.length = 0
        self._stored = torch.empty(2, config.num_kv_heads, capacity, config.head_dim)

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values [n, KV heads, D] of rows `start` .. `start` + n - 1, growing if they do not fit."""
        end = start + len(keys)
        if end > self._stored.shape[2]:
            larger = self._stored.new_empty(2, self._stored.shape[1], 2 * end, self._stored.shape[3])
            larger[:, :, :start] = self._stored[:, :, :start]
            self._stored = larger
        self._stored[0, :, start:end] = keys.transpose(0, 1)
        self._stored[1, :, start:end] = values.transpose(0, 1)

    def attend(self, queries: Tensor, visible: Tensor) -> Tensor:
        """What queries [n, heads, D] attend to, [n, heads, D], where `visible` bool [n, rows] says so."""
        keys, values = self._stored[:, None, :, : visible.shape[1]]
        mask = visible.to(queries.device)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Ingestion:
    """What a session commits before a draft: its newest tokens int64 [n], the last one the bonus, and the fused features
    float [n, H] of the position *before* each (zeros before position 0)."""

    cache: DraftCache
    token_ids: Tensor
    preceding_features: Tensor


@dataclass(frozen=True, eq=False)
class DraftedTree:
    """The nodes that a drafter expanded, root first, each with its children's distribution.

    `token_ids` and `parents` are of length n (the root's token is the bonus, its parent -1); `child_ids` int64 [n, width] and
    `child_log_probs` float32 [n, width] are the likeliest next tokens after each expanded node, best first.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    child_ids: Tensor
    child_log_probs: Tensor


@torch.inference_mode()
def ingest(drafter: RecurrentDrafter, ingestions: Sequence[Ingestion]) -> Tensor:
    """Commit tokens of a batch of sessions to their caches; outputs [sessions, H] at their last tokens, the roots."""
    counts = [len(ingestion.token_ids) for ingestion in ingestions]
    starts = [ingestion.cache.length for ingestion in ingestions]
    rows = drafter.rows(
        torch.cat([ingestion.token_ids for ingestion in ingestions]),
        torch.cat([ingestion.preceding_features for ingestion in ingestions]),
    )
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    parts = drafter.attention_inputs(rows, positions)
    attended = torch.cat(
        [
            _attend_committed(ingestion.cache, *part)
            for ingestion, *part in zip(ingestions, *(torch.split(tensor, counts) for tensor in parts), strict=True)
        ]
    )
    last = torch.tensor(counts).cumsum(0) - 1
    return drafter.finish(rows[last], attended[last])


def _attend_committed(cache: DraftCache, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    start, count = cache.length, len(queries)
    cache.write(start, keys, values)
    cache.length = start + count
    return cache.attend(queries, torch.ones(count, cache.length, dtype=torch.bool).tril(start))


@torch.inference_mode()
def draft(
    drafter: RecurrentDrafter, ingestions: Sequence[Ingestion], *, horizon: int, width: int, beam: int
) -> list[DraftedTree]:
    """Commit, then draft: at each depth short of `horizon` the `beam` likeliest prefixes of each session are expanded.

    Likeliest by the sum of log-probs along the path, among all children of the depth before. A beam of 1 is the chain along the
    drafter's own best guesses: its rows are marginals by depth. Drafted rows never stay in the caches.
    """
    outputs = ingest(drafter, ingestions)
    drafts = [_Draft(ingestion.cache, int(ingestion.token_ids[-1]), width) for ingestion in ingestions]
    rows_of = [1] * len(drafts)
    for depth in range(1, horizon + 1):
        best = drafter.log_probs(outputs).topk(min(width, len(drafter.candidate_ids)))
        child_ids = torch.split(drafter.candidate_ids[best.indices], rows_of)
        for session, ids, log_probs in zip(drafts, child_ids, torch.split(best.values, rows_of), strict=True):
            session.expand(ids, log_probs)
        if depth == horizon:
            break
        chosen = [session.choose(beam) for session in drafts]
        offsets = [sum(rows_of[:index]) for index in range(len(drafts))]
        parents = torch.cat([choice + offset for choice, offset in zip(chosen, offsets, strict=True)])
        outputs = _draft_rows(drafter, drafts, drafter.carried(outputs[parents]))
        rows_of = [session.num_new for session in drafts]
    return [session.tree() for session in drafts]


def _draft_rows(drafter: RecurrentDrafter, drafts: Sequence[_Draft], carried: Tensor) -> Tensor:
    counts = [session.num_new for session in drafts]
    rows = drafter.rows(torch.tensor([token for session in drafts for token in session.new_token_ids]), carried)
    positions = torch.cat([torch.full((session.num_new,), session.position) for session in drafts])
    parts = drafter.attention_inputs(rows, positions)
    attended = [
        session.attend(*part) for session, *part in zip(drafts, *(torch.split(tensor, counts) for tensor in parts), strict=True)
    ]
    return drafter.finish(rows, torch.cat(attended))


class _Draft:
    """One session's nodes while they are drafted. Row r of the cache behind the committed ones is node r + 1."""

    def __init__(self, cache: DraftCache, root_token_id: int, width: int) -> None:
        self._cache, self._width = cache, width
        self._token_ids, self._parents, self._scores = [root_token_id], [-1], [0.0]
        self._child_ids: list[Tensor] = []
        self._child_log_probs: list[Tensor] = []
        self._newest, self.num_new, self.depth = 0, 1, 0
        self._visible = torch.zeros(0, 0, dtype=torch.bool)

    @property
    def position(self) -> int:
        """Position of the newest nodes."""
        return self._cache.length - 1 + self.depth

    @property
    def new_token_ids(self) -> list[int]:
        """Tokens of the newest nodes."""
        return self._token_ids[self._newest :]

    def expand(self, child_ids: Tensor, child_log_probs: Tensor) -> None:
        """Note the children's distribution of the newest nodes."""
        self._child_ids.append(child_ids)
        self._child_log_probs.append(child_log_probs)

    def choose(self, beam: int) -> Tensor:
        """Make the likeliest children of the newest nodes the new newest; their parents, numbered among the old newest."""
        totals = self._child_log_probs[-1] + torch.tensor(self._scores[self._newest :])[:, None]
        best = totals.flatten().topk(min(beam, totals.numel()))
        parents = best.indices // totals.shape[1]
        first_parent, self._newest = self._newest, len(self._token_ids)
        self._token_ids += self._child_ids[-1].flatten()[best.indices].tolist()
        self._parents += (parents + first_parent).tolist()
        self._scores += best.values.tolist()
        self.num_new, self.depth = len(best.indices), self.depth + 1
        return parents

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What the newest nodes attend to: the committed positions, their ancestors and themselves."""
        known = len(self._visible)
        grown = torch.zeros(known + self.num_new, known + self.num_new, dtype=torch.bool)
        grown[:known, :known] = self._visible
        for row in range(known, len(grown)):
            parent_row = self._parents[row + 1] - 1
            if parent_row >= 0:
                grown[row] = grown[parent_row]
            grown[row, row] = True
        self._visible = grown
        self._cache.write(self._cache.length + known, keys, values)
        committed = torch.ones(self.num_new, self._cache.length, dtype=torch.bool)
        return self._cache.attend(queries, torch.cat([committed, grown[known:]], dim=1))

    def tree(self) -> DraftedTree:
        """What was drafted."""
        return DraftedTree(
            tuple(self._token_ids), tuple(self._parents), torch.cat(self._child_ids), torch.cat(self._child_log_probs)
        )


class _FrozenLinear(nn.Module):
    """A linear that is the target's: not trained, not saved."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Norm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, whatever autocast made of the input."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.to(self.weight.dtype))


def _norm(config: RecurrentConfig) -> nn.RMSNorm:
    return _Norm(config.hidden_size, eps=config.rms_epsilon)
