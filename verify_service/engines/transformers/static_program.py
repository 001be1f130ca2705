"""This file is one bucket's whole step: its numbers, and what computes choices and accepted paths from them on the device."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treewire.core.noise import gumbel, hashed_seed, noise_integers_of
from verify_service.attention.bucket import BucketAttention, BucketRows, BucketShape
from verify_service.engines.transformers.lean import LeanForward
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.walk import Trees, Walk, walk

MAX_DRAWN_DEPTHS = 32
"""Noise is made once for each depth of a tree, not for each node; deeper trees draw elsewhere."""

NOT_FINITE = -1
"""The choice where no score is finite."""

_PER_SESSION = 5  # length of the context, nodes, whether it accepts, hashed seed, temperature


class Bucket(NamedTuple):
    """What a step is padded to: sessions, nodes of each, committed tokens of each; `draws` if it makes noise."""

    batch_size: int
    num_nodes: int
    context: int
    draws: bool

    @property
    def shape(self) -> BucketShape:
        """What attention has to know."""
        return BucketShape(self.batch_size, self.num_nodes, self.context)


@dataclass(frozen=True, eq=False)
class Inputs:
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


class Outputs(NamedTuple):
    """Where a bucket's results lie: logits float32, by session and node, of this rank's vocabulary; where a rank has the whole
    of it, `found` of each session, the choices after its nodes and then the packed walk along them, int64; features of the
    rows, if tapped."""

    found: Tensor | None
    logits: Tensor
    features: Tensor | None


class Program:
    """One bucket: its input numbers and what computes its outputs from them.

    `page_size` is that of the store, whose last page is for what fills the bucket. In pages of several slots rows are moved.
    """

    def __init__(self, forward: LeanForward, bucket: Bucket, attention: BucketAttention, page_size: int) -> None:
        self.bucket = bucket
        self._forward = forward
        self._attention = attention
        self._moves_rows = page_size > 1
        self._spare_slot = forward.store.num_slots - page_size
        shape = (bucket.batch_size, Inputs.width(bucket))
        is_cuda = forward.device.type == "cuda"
        self.host = Inputs(torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda), bucket)
        self._inputs = Inputs(torch.zeros(shape, dtype=torch.int64, device=forward.device), bucket)
        self._replay: Callable[[], None] | None = None
        self._outputs: Outputs | None = None

    def write(self, parts: Sequence[Part]) -> None:
        """Put down the numbers of the parts, and of what fills the bucket: sessions without context, nodes behind the root.

        What fills writes to a slot of its own. Nobody sees it, but what has no chance is still multiplied by zero: a session
        reads its root's slot in place of it, which is written in every step and is as finite as the session itself.
        """
        inputs = self.host
        inputs.numbers.zero_()
        inputs.slots.fill_(self._spare_slot)
        inputs.key_slots.fill_(self._spare_slot)
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
            temperature = part.sampling.temperature if draws(part) else 0.0
            accepts = int(accepts_by_walk(part))
            numbers = [length, count, accepts, hashed_seed(part.sampling.seed), _bits(temperature)]
            inputs.per_session[row] = torch.tensor(numbers)
        self._attention.plan([np.concatenate((part.context_slots, part.slots)) for part in parts])

    def run(self) -> Outputs:
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
    def _compute(self) -> Outputs:
        """The whole step on the device."""
        inputs, bucket = self._inputs, self.bucket
        lengths, counts, accepts = inputs.per_session[:, :3].unbind(-1)
        visible = visibility(inputs.parents)
        depths = visible.sum(-1) - 1
        positions = lengths[:, None] + depths
        slots = inputs.slots.contiguous()
        self._attention.begin(BucketRows(lengths, counts, slots, inputs.key_slots, visible))
        rows, features = self._forward.rows(inputs.token_ids.flatten(), positions.flatten(), self._attention)
        logits = self._forward.head(rows).view(bucket.batch_size, bucket.num_nodes, -1)
        if not self._forward.is_whole:
            return Outputs(None, logits, features)
        chosen = self._chosen(logits, positions, depths)
        walked = walk(Trees(inputs.token_ids, inputs.parents, depths, visible, counts), chosen)
        if self._moves_rows and bucket.num_nodes > 1:
            self._keep(walked, accepts, slots)
        return Outputs(torch.cat((chosen, walked.packed()), dim=1), logits, features)

    def _keep(self, walked: Walk, accepts: Tensor, slots: Tensor) -> None:
        """Move the rows of accepted nodes to the places behind the context, where the session goes on; others stay."""
        places = torch.arange(slots.shape[1], device=slots.device)
        is_kept = places < (walked.lengths * accepts)[:, None]
        sources = slots.gather(1, torch.where(is_kept, walked.path, places))
        self._forward.store.move(sources.flatten(), slots.flatten())

    def _chosen(self, logits: Tensor, positions: Tensor, depths: Tensor) -> Tensor:
        """The best of each row, of equals the lower id; -1 where no best is finite."""
        scores = logits
        if self.bucket.draws:
            noise, temperatures = self._noise(positions, depths, logits.shape[-1])
            scores = logits / temperatures[:, None, None] + noise
        best = scores.argmax(dim=-1, keepdim=True)
        return best.masked_fill_(~scores.gather(-1, best).isfinite(), NOT_FINITE)[..., 0]

    def _noise(self, positions: Tensor, depths: Tensor, vocabulary_size: int) -> tuple[Tensor, Tensor]:
        """Noise of each row, none for sessions without, [sessions, nodes, vocabulary]; and what logits are divided by."""
        seeds, temperature_bits = self._inputs.per_session[:, 3:].unbind(-1)
        temperatures = temperature_bits.contiguous().view(torch.float64).float()
        num_depths = min(self.bucket.num_nodes, MAX_DRAWN_DEPTHS)
        drawn = positions[:, :1] + 1 + torch.arange(num_depths, device=positions.device)
        token_ids = torch.arange(vocabulary_size, device=positions.device)
        rows = gumbel(noise_integers_of(seeds[:, None, None], drawn[..., None], token_ids), torch).float()
        rows.masked_fill_((temperatures == 0.0)[:, None, None], 0.0)
        index = depths.clamp(max=num_depths - 1)[..., None].expand(-1, -1, vocabulary_size)
        return rows.gather(1, index), torch.where(temperatures == 0.0, 1.0, temperatures)


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


def is_plain(part: Part) -> bool:
    """True if the choices are the best of logits, or of tempered logits with noise, and nothing is asked beside them."""
    sampling = part.sampling
    limits = not sampling.is_greedy and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    asked = part.num_node_probabilities or part.masks is not None
    return not (sampling.reads_history or sampling.logit_bias or asked or limits)


def accepts_by_walk(part: Part) -> bool:
    """True if the bucket's own walk is what is accepted of the part's tree."""
    return part.accepts and is_plain(part)


def draws(part: Part) -> bool:
    """True if the bucket makes the part's noise."""
    return is_plain(part) and not part.sampling.is_greedy


def _bits(number: float) -> int:
    """A float64 as the integer of the same bits."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
