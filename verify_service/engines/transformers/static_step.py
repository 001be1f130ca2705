"""This file is the step on static buffers: trees padded to a bucket, all inputs in place, so that a graph can replay it.

One copy brings a step's numbers to the device; everything that follows from them (positions, mask, noise, choices) is computed
there, in memory that stays where it is, without asking the host; one copy brings the choices back. On CUDA a bucket is
captured as a graph, elsewhere the same function runs eagerly. What a bucket cannot hold runs as ragged rows, and is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewire.core.noise import gumbel, hashed_seed, noise_integers_of
from treewire.core.tree import TokenLogProbs
from treewire.kv.rows import Moves
from treewire.kv.store import KvStore
from verify_service.attention.tree_attention import fused_core
from verify_service.engine import Posterior, SessionId
from verify_service.engines.sampling import TensorDistributions, process
from verify_service.engines.transformers.choices import Chooser
from verify_service.engines.transformers.lean import LeanForward
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.runner import LocalRunner

GraphsMode = Literal["auto", "on", "off"]
"""Whether trees run on static buffers; auto is on CUDA alone."""

NUM_NODES = (1, 8, 17, 33, 65, 129, 257, 513)
"""Nodes of the buckets, root included."""

BATCH_SIZES = (1, 2, 4, 8)
_SMALLEST_CONTEXT = 256
_MAX_DRAWN_DEPTHS = 32  # noise is made once for each depth of a tree, not for each node; deeper trees draw outside
_PER_SESSION = 3  # length of the context, hashed seed, temperature
_NOT_FINITE = -1


class Bucket(NamedTuple):
    """What a step is padded to: sessions, nodes of each, committed tokens of each; `draws` if it makes noise."""

    batch_size: int
    num_nodes: int
    context: int
    draws: bool


class StaticAttention:
    """Attention of a bucket's rows over their contexts and their own trees; every row has a place, used or not."""

    def __init__(self, store: KvStore, key_slots: Tensor, slots: Tensor, mask: Tensor) -> None:
        self._store = store
        self._key_slots = key_slots  # [sessions, context + nodes]
        self._slots = slots  # [sessions x nodes]
        self._mask = mask  # additive [sessions, nodes, context + nodes]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values [rows, KV heads, size], attend with queries [rows, heads, size]; [rows, heads, size]."""
        self._store.write(layer, self._slots, key, value)
        stored = self._store.read(layer, self._key_slots)
        queries = query.view(*self._mask.shape[:2], *query.shape[1:]).transpose(1, 2)
        scale = query.shape[-1] ** -0.5
        keys, values = stored.keys.transpose(1, 2), stored.values.transpose(1, 2)
        return fused_core(queries, keys, values, self._mask, False, scale).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Views of a bucket's input numbers, int64: one row a session."""

    numbers: Tensor
    bucket: Bucket

    @property
    def token_ids(self) -> Tensor:
        return self._columns(0, self.bucket.num_nodes)

    @property
    def parents(self) -> Tensor:
        """Of each node, the root's own being 0."""
        return self._columns(self.bucket.num_nodes, self.bucket.num_nodes)

    @property
    def slots(self) -> Tensor:
        """Where the nodes' keys and values go."""
        return self._columns(2 * self.bucket.num_nodes, self.bucket.num_nodes)

    @property
    def key_slots(self) -> Tensor:
        """The context's slots, then the nodes'."""
        return self._columns(3 * self.bucket.num_nodes, self.bucket.context + self.bucket.num_nodes)

    @property
    def per_session(self) -> Tensor:
        return self.numbers[:, -_PER_SESSION:]

    def _columns(self, start: int, count: int) -> Tensor:
        return self.numbers[:, start : start + count]

    @staticmethod
    def width(bucket: Bucket) -> int:
        """Numbers of one session."""
        return 4 * bucket.num_nodes + bucket.context + _PER_SESSION


class _Outputs(NamedTuple):
    """Where a bucket's results lie: logits float32, by session and node, of this rank's vocabulary; choices int64, where a
    rank has the whole of it; features of the rows, if tapped."""

    chosen: Tensor | None
    logits: Tensor
    features: Tensor | None


class _Program:
    """One bucket: its input numbers and what computes its outputs from them."""

    def __init__(self, forward: LeanForward, bucket: Bucket) -> None:
        self.bucket = bucket
        self._forward = forward
        shape = (bucket.batch_size, _Inputs.width(bucket))
        is_cuda = forward.device.type == "cuda"
        self.host = _Inputs(torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda), bucket)
        self._inputs = _Inputs(torch.zeros(shape, dtype=torch.int64, device=forward.device), bucket)
        self._replay: Callable[[], None] | None = None
        self._outputs: _Outputs | None = None

    def run(self) -> _Outputs:
        """Compute the host's numbers."""
        self._inputs.numbers.copy_(self.host.numbers)  # done when it returns: the host's are written anew for the next step
        if self._replay is None:
            return self._compute()
        self._replay()
        assert self._outputs is not None
        return self._outputs

    def capture(self, pool: Any) -> None:
        """Make a CUDA graph of it, in memory that all graphs share; of the numbers that the host has now."""
        self._inputs.numbers.copy_(self.host.numbers)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute()  # kernels choose their algorithms, libraries allocate
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._outputs = self._compute()
        self._replay = graph.replay

    @torch.inference_mode()
    def _compute(self) -> _Outputs:
        """The whole step on the device."""
        inputs, bucket = self._inputs, self.bucket
        lengths = inputs.per_session[:, 0]
        visible = visibility(inputs.parents)
        depths = visible.sum(-1) - 1
        positions = lengths[:, None] + depths
        columns = torch.arange(bucket.context, device=lengths.device)
        in_context = (columns < lengths[:, None])[:, None].expand(-1, bucket.num_nodes, -1)
        seen = torch.cat((in_context, visible), dim=-1)
        mask = torch.zeros(seen.shape, dtype=self._forward.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        attention = StaticAttention(self._forward.store, inputs.key_slots, inputs.slots.flatten(), mask)
        rows, features = self._forward.rows(inputs.token_ids.flatten(), positions.flatten(), attention)
        logits = self._forward.head(rows).view(bucket.batch_size, bucket.num_nodes, -1)
        chosen = self._chosen(logits, positions, depths) if self._forward.is_whole else None
        return _Outputs(chosen, logits, features)

    def _chosen(self, logits: Tensor, positions: Tensor, depths: Tensor) -> Tensor:
        """The best of each row, of equals the lower id; -1 where no best is finite."""
        scores = logits
        if self.bucket.draws:
            noise, temperatures = self._noise(positions, depths, logits.shape[-1])
            scores = logits / temperatures[:, None, None] + noise
        best = scores.argmax(dim=-1, keepdim=True)
        return best.masked_fill_(~scores.gather(-1, best).isfinite(), _NOT_FINITE)[..., 0]

    def _noise(self, positions: Tensor, depths: Tensor, vocabulary_size: int) -> tuple[Tensor, Tensor]:
        """Noise of each row, none for sessions without, [sessions, nodes, vocabulary]; and what logits are divided by."""
        _, seeds, temperature_bits = self._inputs.per_session.unbind(-1)
        temperatures = temperature_bits.contiguous().view(torch.float64).float()
        num_depths = min(self.bucket.num_nodes, _MAX_DRAWN_DEPTHS)
        drawn = positions[:, :1] + 1 + torch.arange(num_depths, device=positions.device)
        token_ids = torch.arange(vocabulary_size, device=positions.device)
        rows = gumbel(noise_integers_of(seeds[:, None, None], drawn[..., None], token_ids), torch).float()
        rows.masked_fill_((temperatures == 0.0)[:, None, None], 0.0)
        index = depths.clamp(max=num_depths - 1)[..., None].expand(-1, -1, vocabulary_size)
        return rows.gather(1, index), torch.where(temperatures == 0.0, 1.0, temperatures)


class StaticRunner:
    """Runs steps of trees in buckets, all others as ragged rows: `verify_service.engines.transformers.runner.Runner`.

    `max_nodes` and `max_context` bound the buckets. On CUDA a bucket is captured when it is first needed; elsewhere, and
    without `captures`, it runs eagerly. The last slot of the store is for what fills buckets: it must not be handed out.
    """

    def __init__(
        self, forward: LeanForward, chooser: Chooser, *, max_nodes: int, max_context: int, captures: bool = True
    ) -> None:
        self._forward = forward
        self._chooser = chooser
        self._ragged = LocalRunner(forward, self._chooser)
        self._num_nodes = _up_to(NUM_NODES, max_nodes)
        self._contexts = _contexts(max_context)
        self._scratch_slot = forward.store.num_slots - 1
        self._programs: dict[Bucket, _Program] = {}
        self.num_missed_graphs = 0
        self._pool = torch.cuda.graph_pool_handle() if captures and forward.device.type == "cuda" else None

    def step(self, parts: Sequence[Part]) -> Sequence[Posterior]:
        """Run all parts in one forward; one posterior each, in order."""
        bucket = self.bucket_for(parts)
        if bucket is None:
            self.num_missed_graphs += 1
            return self._ragged.step(parts)
        program = self.program(bucket)
        self.write(program.host, parts)
        outputs = program.run()
        posteriors = self._posteriors(parts, outputs)
        return [self._with_features(*each, outputs) for each in zip(parts, range(len(parts)), posteriors, strict=True)]

    def move(self, moves: Moves) -> None:
        """Copy rows of the KV store."""
        self._ragged.move(moves)

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._chooser.forget(session)

    def bucket_for(self, parts: Sequence[Part]) -> Bucket | None:
        """The smallest that holds a step; None for a step with chunks, or one that is too large for any."""
        if any(part.tree is None or _is_too_deep(part) for part in parts):
            return None
        batch_size = _smallest(BATCH_SIZES, len(parts))
        num_nodes = _smallest(self._num_nodes, max(map(len, parts)))
        context = _smallest(self._contexts, max(len(part.context_slots) for part in parts))
        if batch_size is None or num_nodes is None or context is None:
            return None
        draws = self._forward.is_whole and any(_draws(part) for part in parts)
        return Bucket(batch_size, num_nodes, context, draws)

    def program(self, bucket: Bucket) -> _Program:
        """A bucket's program, captured if this machine captures."""
        if bucket not in self._programs:
            program = _Program(self._forward, bucket)
            if self._pool is not None:
                self.write(program.host, ())
                program.capture(self._pool)
            self._programs[bucket] = program
        return self._programs[bucket]

    def write(self, inputs: _Inputs, parts: Sequence[Part]) -> None:
        """Numbers of the parts, and of what fills the bucket: sessions without context, nodes that hang on the root.

        What fills writes to a slot of its own. Nobody sees it, but what has no chance is still multiplied by zero: a session
        reads its root's slot in place of it, which is written in every step and is as finite as the session itself.
        """
        inputs.numbers.zero_()
        inputs.slots.fill_(self._scratch_slot)
        inputs.key_slots.fill_(self._scratch_slot)
        for row, part in enumerate(parts):
            assert part.tree is not None, "a bucket holds trees"
            count, length = len(part), len(part.context_slots)
            inputs.token_ids[row, :count] = torch.tensor(part.token_ids)
            inputs.parents[row, 1:count] = torch.tensor(part.tree.parents[1:], dtype=torch.int64)
            slots, context = torch.from_numpy(part.slots), inputs.bucket.context
            inputs.slots[row, :count] = slots
            inputs.key_slots[row] = slots[0]
            inputs.key_slots[row, :length] = torch.from_numpy(part.context_slots)
            inputs.key_slots[row, context : context + count] = slots
            temperature = part.sampling.temperature if _draws(part) else 0.0
            inputs.per_session[row] = torch.tensor([length, hashed_seed(part.sampling.seed), _bits(temperature)])

    def _posteriors(self, parts: Sequence[Part], outputs: _Outputs) -> Sequence[Posterior]:
        """One for each part; what its bucket did not choose for it is chosen from the bucket's logits."""
        logits = [outputs.logits[row, : len(part)] for row, part in enumerate(parts)]
        if outputs.chosen is None:
            return self._chooser.posteriors(parts, logits)
        chosen = outputs.chosen.cpu()
        return [
            _plain_posterior(part, logits[row], chosen[row])
            if _is_plain(part)
            else self._chooser.posteriors([part], logits[row : row + 1])[0]
            for row, part in enumerate(parts)
        ]

    def _with_features(self, part: Part, row: int, posterior: Posterior, outputs: _Outputs) -> Posterior:
        if not part.wants_features or outputs.features is None:
            return posterior
        first = row * outputs.logits.shape[1]
        return replace(posterior, features=outputs.features[first : first + len(part)].cpu().numpy())


def _plain_posterior(part: Part, logits: Tensor, chosen: Tensor) -> Posterior:
    """Of choices that the bucket made."""
    token_ids = tuple(chosen[: len(part)].tolist())
    if _NOT_FINITE in token_ids:
        raise FloatingPointError("the target's logits are not finite")
    return Posterior(token_ids, distributions=_Later(part, logits))


class _Later:
    """`verify_service.engine.Distributions` of plain choices, processed when they are first asked for."""

    def __init__(self, part: Part, logits: Tensor) -> None:
        self._part, self._logits = part, logits

    @cached_property
    def _distributions(self) -> TensorDistributions:
        with torch.inference_mode():
            processed = process(self._logits, self._part.sampling, self._part.histories)
        return TensorDistributions(self._logits, processed, is_greedy=self._part.sampling.is_greedy)

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node, float64 [vocabulary]."""
        return self._distributions.probabilities(node)

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the likeliest ones; before any processing."""
        return self._distributions.log_probs(nodes, token_ids, num_top)


def visibility(parents: Tensor) -> Tensor:
    """Which nodes each node sees, itself and its ancestors, bool [sessions, nodes, nodes]; the parent of a root is itself.

    By doubling: after k rounds a node sees 2**k generations, so the number of operations depends on the shape alone.
    """
    num_nodes = parents.shape[1]
    visible = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    ancestors = parents
    for _ in range((num_nodes - 1).bit_length()):
        visible = visible | visible.gather(1, ancestors[..., None].expand(-1, -1, num_nodes))
        ancestors = ancestors.gather(1, ancestors)
    return visible


def _is_plain(part: Part) -> bool:
    """True if the choices are the best of logits, or of tempered logits with noise, and nothing is asked beside them."""
    sampling = part.sampling
    limits = not sampling.is_greedy and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    asked = part.num_node_probabilities or part.masks is not None
    return not (sampling.reads_history or sampling.logit_bias or asked or limits)


def _draws(part: Part) -> bool:
    return _is_plain(part) and not part.sampling.is_greedy


def _is_too_deep(part: Part) -> bool:
    assert part.tree is not None
    return _draws(part) and max(part.tree.depths) >= _MAX_DRAWN_DEPTHS


def _bits(number: float) -> int:
    """A float64 as the integer of the same bits."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def _smallest(sizes: Sequence[int], needed: int) -> int | None:
    return next((size for size in sizes if size >= needed), None)


def _up_to(sizes: Sequence[int], needed: int) -> tuple[int, ...]:
    """The sizes up to the first that is enough."""
    return tuple(size for number, size in enumerate(sizes) if not number or sizes[number - 1] < needed)


def _contexts(max_context: int) -> tuple[int, ...]:
    """Lengths of contexts, each twice the one before."""
    lengths = [_SMALLEST_CONTEXT]
    while lengths[-1] < max_context:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)
