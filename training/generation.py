"""This file is generation: the target answers prompts, many at a time over its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.corpus import Generation
from training.target import Target

GREEDY = {"do_sample": False}


@dataclass(frozen=True)
class Answering:
    """How the target answers. Temperature 0 is greedy. Raises ValueError on a length below 1 or a negative temperature."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"answers of {self.max_new_tokens} tokens at temperature {self.temperature}: at least 1 and 0 are needed"
            )


@torch.inference_mode()
def answer(target: Target, prompts: Sequence[tuple[int, ...]], answering: Answering, source: str) -> list[Generation]:
    """The target's continuation of each prompt, in order, as one batch; each ends with an end token or at the length."""
    width, end = max(map(len, prompts)), target.end_token_ids
    token_ids = torch.full((len(prompts), width), end[0])
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    choice = {"do_sample": True, "temperature": answering.temperature, "top_k": 0} if answering.temperature else GREEDY
    torch.manual_seed(answering.seed)
    with target.precision():
        output = target.model.generate(
            token_ids, attention_mask=mask, max_new_tokens=answering.max_new_tokens, pad_token_id=end[0], **choice
        )
    continuations = (until_end(row, end) for row in output[:, width:].tolist())
    return [
        Generation(prompt, continuation, answering.temperature, source)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]


def until_end(token_ids: Sequence[int], end_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to the first end token, which is included."""
    for index, token_id in enumerate(token_ids):
        if token_id in end_token_ids:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)
