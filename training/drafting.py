"""This file is the bridge from drafters to the evaluation: their guesses after every token of captured answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draft_service.engines.dflash.model import BlockIngestion, DFlashCache, DFlashDrafter, draft_blocks
from draft_service.engines.recurrent.model import DraftCache, DraftedTree, Ingestion, RecurrentDrafter, draft
from training.batches import Batch
from training.evaluation import Guess, GuessedAnswer


@torch.inference_mode()
def guess_with_chains(
    drafter: RecurrentDrafter, batch: Batch, *, horizon: int, width: int, beam: int
) -> list[GuessedAnswer[Guess]]:
    """Draft after each generated token of a batch of sequences, committing one token a time, as the engine would."""
    features = torch.nn.functional.pad(drafter.features(batch.taps.float()), (0, 0, 1, 0))
    caches = [DraftCache(drafter.config) for _ in batch.lengths]
    guesses: list[list[Guess]] = [[] for _ in caches]
    for rows, commits in _commits(batch):
        ingestions = [
            Ingestion(caches[row], batch.token_ids[row, commit], features[row, commit])
            for row, commit in zip(rows, commits, strict=True)
        ]
        for row, drafted in zip(rows, draft(drafter, ingestions, horizon=horizon, width=width, beam=beam), strict=True):
            guesses[row].append(_guess(drafted))
    return [GuessedAnswer(answer, tuple(said)) for answer, said in zip(_answers(batch), guesses, strict=True)]


@torch.inference_mode()
def guess_with_blocks(drafter: DFlashDrafter, batch: Batch, *, width: int) -> list[GuessedAnswer[Guess]]:
    """Draft one block after each generated token of a batch of sequences, committing one token a time."""
    features = drafter.features(batch.taps.float())
    caches = [DFlashCache(drafter.config) for _ in batch.lengths]
    guesses: list[list[Guess]] = [[] for _ in caches]
    for rows, commits in _commits(batch):
        ingestions = [
            BlockIngestion(
                caches[row],
                features[row, max(commit.start - 1, 0) : commit.stop - 1],
                int(batch.token_ids[row, commit.stop - 1]),
            )
            for row, commit in zip(rows, commits, strict=True)
        ]
        best = draft_blocks(drafter, ingestions).log_softmax(-1).topk(width)
        for row, token_ids, log_probs in zip(rows, best.indices, best.values, strict=True):
            paths = tuple(tuple(token_ids[:depth, 0].tolist()) for depth in range(len(token_ids)))
            guesses[row].append(Guess(paths, token_ids.numpy(), log_probs.double().numpy()))
    return [GuessedAnswer(answer, tuple(said)) for answer, said in zip(_answers(batch), guesses, strict=True)]


def _commits(batch: Batch) -> Iterator[tuple[list[int], list[slice]]]:
    """Rounds that commit one generated token each, the first one the prompt too: the rows that go on, and what they commit."""
    committed = [0] * len(batch.lengths)
    for offset in range(1, int((batch.lengths - batch.prompt_lengths).max())):
        lengths = [int(prompt) + offset for prompt in batch.prompt_lengths]
        rows = [row for row, length in enumerate(lengths) if length < int(batch.lengths[row])]
        yield rows, [slice(committed[row], lengths[row]) for row in rows]
        committed = lengths


def _guess(drafted: DraftedTree) -> Guess:
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafted.token_ids[1:], drafted.parents[1:], strict=True):
        paths.append((*paths[parent], token_id))
    return Guess(tuple(paths), drafted.child_ids.numpy(), drafted.child_log_probs.double().numpy())


def _answers(batch: Batch) -> Sequence[tuple[int, ...]]:
    tokens: list[Tensor] = [
        row[int(prompt) : int(length)]
        for row, prompt, length in zip(batch.token_ids, batch.prompt_lengths, batch.lengths, strict=True)
    ]
    return [tuple(row.tolist()) for row in tokens]
