"""This file is the target's choices where each rank has the logits of a span of the vocabulary.

A choice is the best of the ranks' best: two numbers a row and rank cross, not the row. Rows are brought together only where
something is asked that no rank can tell of its own span: top-k, top-p, min-p, masks, node probabilities; and, after the step,
of the nodes whose distributions are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treewire.core.history import NodeHistories
from treewire.core.sampling import Sampling
from verify_service.engine import Posterior, SessionId
from verify_service.engines.ranks.questions import AskProbabilities, Question
from verify_service.engines.sampling import TensorDistributions, adjust, process
from verify_service.engines.transformers.choices import Noise, WholeRows
from verify_service.engines.transformers.group import Group
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.shard import Shard


class ShardedRows:
    """Chooses together with the other ranks. On rank 0 posteriors are complete, on the others they are empty."""

    def __init__(self, vocabulary_size: int, shard: Shard, group: Group) -> None:
        self._spans = [Shard(rank, shard.size).span(vocabulary_size) for rank in range(shard.size)]
        self._span = self._spans[shard.rank]
        self._shard = shard
        self._group = group
        self._noise = Noise(self._span)
        self._whole = WholeRows(vocabulary_size)
        self._parts: Sequence[Part] = ()
        self._logits: Sequence[Tensor] = ()
        self._brought: dict[int, Posterior] = {}
        self.num_rows_gathered = 0

    @torch.inference_mode()
    def posteriors(self, parts: Sequence[Part], logits: Sequence[Tensor]) -> Sequence[Posterior]:
        """One for each part; collectives first, so that a row that is not finite fails on rank 0 with none pending."""
        self._parts, self._logits, self._brought = parts, logits, {}
        choosing = [number for number, part in enumerate(parts) if part.num_choices]
        whole = [number for number in choosing if needs_whole_rows(parts[number])]
        sharded = [number for number in choosing if not needs_whole_rows(parts[number])]
        chosen = self._chosen(sharded) if sharded else []
        rows = self._gathered(torch.cat([logits[number] for number in whole])) if whole else None
        if not self._shard.is_first:
            return [Posterior(())] * len(parts)
        posteriors = dict(zip(sharded, chosen, strict=True))
        if rows is not None:
            split = torch.split(rows, [parts[number].num_choices for number in whole])
            self._brought = dict(zip(whole, self._whole.posteriors([parts[number] for number in whole], split), strict=True))
        return [posteriors.get(number) or self._brought.get(number) or Posterior(()) for number in range(len(parts))]

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._noise.forget(session)
        self._whole.forget(session)

    @torch.inference_mode()
    def answer(self, question: Question) -> object:
        """What the distributions of the last step say; every rank is asked, rank 0 answers, the others say None."""
        nodes = (question.node,) if isinstance(question, AskProbabilities) else question.nodes
        if needs_whole_rows(self._parts[question.part]):
            if not self._shard.is_first:
                return None
            distributions, numbers = self._brought[question.part].distributions, nodes
        else:
            distributions, numbers = self._distributions(question.part, nodes), tuple(range(len(nodes)))
        if distributions is None:
            return None
        if isinstance(question, AskProbabilities):
            return distributions.probabilities(numbers[0])
        return distributions.log_probs(numbers, question.token_ids, question.num_top)

    def _chosen(self, numbers: Sequence[int]) -> list[Posterior]:
        """Posteriors of these parts by the best of the ranks' best; of equals the lower id, as ranks are in its order."""
        best = torch.cat([self._best(self._parts[number], self._logits[number]) for number in numbers])
        gathered = self._group.gather(best)
        if not gathered:
            return []
        together = torch.stack(tuple(gathered))  # ranks, rows, (score, token id)
        winners = together[:, :, 0].argmax(dim=0)
        scores, token_ids = together[winners, torch.arange(len(winners), device=winners.device)].unbind(-1)
        if not scores.isfinite().all():
            raise FloatingPointError("the target's logits are not finite")
        split = torch.split(token_ids.long(), [self._parts[number].num_choices for number in numbers])
        return [Posterior(tuple(own.tolist())) for own in split]

    def _best(self, part: Part, logits: Tensor) -> Tensor:
        """Of this rank's span the best score of each row and its token id, float64 [rows, 2]."""
        adjusted = adjust(logits, local_sampling(part.sampling, self._span), local_histories(part.histories, self._span))
        noise_rows = self._noise.of(part, logits.device)
        scores = adjusted if noise_rows is None else adjusted / part.sampling.temperature + noise_rows
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.cat((scores.gather(1, best).double(), (best + self._span.start).double()), dim=1)

    def _distributions(self, number: int, nodes: Sequence[int]) -> TensorDistributions | None:
        """Of some nodes of a part whose rows lie on the ranks, brought together on rank 0."""
        part = self._parts[number]
        index = torch.tensor(nodes, dtype=torch.int64, device=self._logits[number].device)
        rows = self._gathered(self._logits[number][index])
        if rows is None:
            return None
        processed = process(rows, part.sampling, _of_nodes(part.histories, nodes))
        return TensorDistributions(rows, processed, is_greedy=part.sampling.is_greedy)

    def _gathered(self, rows: Tensor) -> Tensor | None:
        """Whole rows of logits on rank 0."""
        self.num_rows_gathered += len(rows)
        widest = max(span.stop - span.start for span in self._spans)
        gathered = self._group.gather(pad(rows, (0, widest - rows.shape[1])))
        if not gathered:
            return None
        parts = [own[:, : span.stop - span.start] for own, span in zip(gathered, self._spans, strict=True)]
        return torch.cat(parts, dim=1)


def needs_whole_rows(part: Part) -> bool:
    """True if the part's choices, or what is asked with them, cannot be told from spans of the rows."""
    sampling = part.sampling
    limits = bool(sampling.top_k) or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return part.masks is not None or bool(part.num_node_probabilities) or (limits and not sampling.is_greedy)


def local_sampling(sampling: Sampling, span: slice) -> Sampling:
    """The parameters with those tokens only that are in the span, counted from its start."""
    return replace(
        sampling,
        logit_bias=tuple(
            (token_id - span.start, bias) for token_id, bias in sampling.logit_bias if span.start <= token_id < span.stop
        ),
        stop_token_ids=tuple(
            token_id - span.start for token_id in sampling.stop_token_ids if span.start <= token_id < span.stop
        ),
    )


def local_histories(histories: NodeHistories | None, span: slice) -> NodeHistories | None:
    """The same of what was said."""
    if histories is None:
        return None
    own = slice(*np.searchsorted(histories.token_ids, (span.start, span.stop)))
    return replace(
        histories,
        token_ids=histories.token_ids[own] - span.start,
        in_prompt=histories.in_prompt[own],
        output_counts=histories.output_counts[:, own],
    )


def _of_nodes(histories: NodeHistories | None, nodes: Sequence[int]) -> NodeHistories | None:
    if histories is None:
        return None
    rows = list(nodes)
    return replace(histories, output_counts=histories.output_counts[rows], num_output_tokens=histories.num_output_tokens[rows])
