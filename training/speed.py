"""This file is the price of a draft: one round of a recurrent drafter against one step of the target, in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from draft_service.engines.recurrent.model import DraftCache, Ingestion, RecurrentDrafter, draft, ingest
from training.target import Target

TOKENS_A_ROUND = 2


@dataclass(frozen=True)
class Price:
    """Medians in milliseconds of CPU time on one thread, for one session: a draft round and a one-token step of the target."""

    beam: int
    draft_ms: float
    target_ms: float

    @property
    def share(self) -> float:
        """The draft's share of a target step."""
        return self.draft_ms / self.target_ms


@torch.inference_mode()
def price(
    drafter: RecurrentDrafter, target: Target, *, beam: int, width: int, context: int = 256, num_rounds: int = 20
) -> Price:
    """Time both, taking turns, after `context` tokens; the round commits TOKENS_A_ROUND tokens and drafts to the horizon."""
    token_ids = torch.arange(context) + 1
    features = torch.randn(context, drafter.config.hidden_size)
    cache, target_cache = DraftCache(drafter.config), DynamicCache()
    ingest(drafter, [Ingestion(cache, token_ids, features)])
    target.model(input_ids=token_ids[None], past_key_values=target_cache, use_cache=True)

    def draft_round() -> None:
        cache.length = context
        new = Ingestion(cache, token_ids[:TOKENS_A_ROUND], features[:TOKENS_A_ROUND])
        draft(drafter, [new], horizon=drafter.config.horizon, width=width, beam=beam)

    def target_step() -> None:
        with target.precision():
            target.model(input_ids=token_ids[None, :1], past_key_values=target_cache, use_cache=True)
        target_cache.crop(-1)

    drafts, steps = [], []
    for _ in range(num_rounds):
        drafts.append(_milliseconds(draft_round))
        steps.append(_milliseconds(target_step))
    return Price(beam, statistics.median(drafts), statistics.median(steps))


def _milliseconds(action: Callable[[], None]) -> float:
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1000
