"""This file is the step on static buffers: trees padded to a bucket, all inputs in place, so that a graph can replay it.

One copy brings a step's numbers to the device; everything that follows from them (positions, mask, noise, choices) is computed
there, in memory that stays where it is, without asking the host, up to the accepted path and its rows in larger pages; one copy
brings choices and paths back. On CUDA a bucket is captured as a graph, elsewhere the same function runs eagerly. What a bucket
cannot hold runs as ragged rows, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewire.core.tree import TokenLogProbs
from treewire.kv.rows import Moves
from verify_service.attention.backends import AttentionKind, AttentionPlace, make_attention
from verify_service.attention.bucket import BucketShape
from verify_service.engine import Posterior, SessionId
from verify_service.engines.sampling import TensorDistributions, process
from verify_service.engines.transformers.choices import Chooser
from verify_service.engines.transformers.lean import LeanForward
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.runner import LocalRunner
from verify_service.engines.transformers.static_program import (
    MAX_DRAWN_DEPTHS,
    NOT_FINITE,
    Bucket,
    Outputs,
    Program,
    draws,
    is_plain,
)
from verify_service.engines.transformers.walk import Walk

GraphsMode = Literal["auto", "on", "off"]
"""Whether trees run on static buffers; auto is on CUDA alone."""

NUM_NODES = (1, 8, 17, 33, 65, 129, 257, 513)
"""Nodes of the buckets, root included."""

BATCH_SIZES = (1, 2, 4, 8)
_SMALLEST_CONTEXT = 256


@dataclass(frozen=True)
class StaticOptions:
    """What steps on static buffers are to be: `max_nodes` and `max_context` bound the buckets, `page_size` is that of the KV
    memory. Without `captures` they run eagerly on CUDA too."""

    max_nodes: int
    max_context: int
    page_size: int = 1
    attention: AttentionKind = "auto"
    captures: bool = True


class StaticRunner:
    """Runs steps of trees in buckets, all others as ragged rows: `verify_service.engines.transformers.runner.Runner`.

    On CUDA a bucket is captured when it is first needed, elsewhere it runs eagerly. The last page of the store is for what
    fills buckets: it must not be handed out. In pages of more than one slot the rows of what a step accepts are moved in it.
    Raises Unsupported, with the reason, for an attention that cannot be had.
    """

    def __init__(self, forward: LeanForward, chooser: Chooser, options: StaticOptions) -> None:
        self._forward = forward
        self._page_size = options.page_size
        self._chooser = chooser
        self._ragged = LocalRunner(forward, self._chooser)
        self._num_nodes = _up_to(NUM_NODES, options.max_nodes)
        self._contexts = _contexts(options.max_context)
        place = AttentionPlace(forward.device, forward.dtype, forward.heads)
        largest = BucketShape(BATCH_SIZES[-1], self._num_nodes[-1], self._contexts[-1])
        self._attention = make_attention(options.attention, place, forward.store, options.page_size, largest)
        self._programs: dict[Bucket, Program] = {}
        self.num_missed_graphs = 0
        self._pool = torch.cuda.graph_pool_handle() if options.captures and forward.device.type == "cuda" else None

    def step(self, parts: Sequence[Part]) -> Sequence[Posterior]:
        """Run all parts in one forward; one posterior each, in order."""
        bucket = self.bucket_for(parts)
        if bucket is None:
            self.num_missed_graphs += 1
            return self._ragged.step(parts)
        program = self.program(bucket)
        program.write(parts)
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
        has_noise = self._forward.is_whole and any(draws(part) for part in parts)
        return Bucket(batch_size, num_nodes, context, has_noise)

    def program(self, bucket: Bucket) -> Program:
        """A bucket's program, captured if this machine captures."""
        if bucket not in self._programs:
            program = Program(self._forward, bucket, self._attention(bucket.shape), self._page_size)
            if self._pool is not None:
                program.write(())
                program.capture(self._pool)
            self._programs[bucket] = program
        return self._programs[bucket]

    def _posteriors(self, parts: Sequence[Part], outputs: Outputs) -> Sequence[Posterior]:
        """One for each part; what its bucket did not choose for it is chosen from the bucket's logits."""
        logits = [outputs.logits[row, : len(part)] for row, part in enumerate(parts)]
        if outputs.found is None:
            return self._chooser.posteriors(parts, logits)
        num_nodes, found = outputs.logits.shape[1], outputs.found.tolist()
        return [
            _plain_posterior(part, logits[row], found[row][:num_nodes], found[row][num_nodes:])
            if is_plain(part)
            else self._chooser.posteriors([part], logits[row : row + 1])[0]
            for row, part in enumerate(parts)
        ]

    def _with_features(self, part: Part, row: int, posterior: Posterior, outputs: Outputs) -> Posterior:
        if not part.wants_features or outputs.features is None:
            return posterior
        first = row * outputs.logits.shape[1]
        return replace(posterior, features=outputs.features[first : first + len(part)].cpu().numpy())


def _plain_posterior(part: Part, logits: Tensor, choices: Sequence[int], walked: Sequence[int]) -> Posterior:
    """Of what the bucket made for a session: its choices and its packed walk."""
    token_ids = tuple(choices[: len(part)])
    if NOT_FINITE in token_ids:
        raise FloatingPointError("the target's logits are not finite")
    acceptance = Walk.acceptance(walked) if part.accepts else None
    return Posterior(token_ids, distributions=_Later(part, logits), acceptance=acceptance)


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


def _is_too_deep(part: Part) -> bool:
    assert part.tree is not None
    return draws(part) and max(part.tree.depths) >= MAX_DRAWN_DEPTHS


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
