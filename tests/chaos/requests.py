"""The requests of a chaos or load run, and the tokens of each when nothing disturbs it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import treewire
from gateway.stopping import Stopping, StopRules
from gateway.tokenization import Tokenization
from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.simulated import FIRST_WORD_ID, SimulatedModel
from treewire.core.tree import Commit, DraftTree
from treewire.types import Options
from verify_service.engine import PrefillChunk, Scoring
from verify_service.engines.simulated import SimulatedTarget

TEXTS = (
    "Once upon a time there was a",
    "The three most important rules of gardening are",
    "1 2 3 1 2 3 1 2",
    "def fibonacci(n):",
    "The sea was calm, and",
)


@dataclass(frozen=True)
class Request:
    """One request. It has token ids (simulated model) or text (a real one)."""

    token_ids: tuple[int, ...] | None
    text: str | None
    sampling: Sampling
    max_tokens: int
    ignore_end: bool

    def options(self) -> Options:
        """What the client is given."""
        sampling = treewire.Sampling(temperature=self.sampling.temperature, seed=self.sampling.seed)
        options: Options = {"sampling": sampling, "max_tokens": self.max_tokens, "ignore_end": self.ignore_end}
        if self.token_ids is not None:
            options["token_ids"] = list(self.token_ids)
        else:
            assert self.text is not None
            options["text"] = self.text
        return options


@dataclass(frozen=True)
class Output:
    """What a request must give: these tokens, this text."""

    token_ids: tuple[int, ...]
    text: str


def simulated_requests(count: int, seed: int) -> list[Request]:
    """Distinct requests to the simulated model: greedy and seeded, with and without an end."""
    chance = random.Random(seed)
    return [
        Request(
            token_ids=tuple(chance.randrange(FIRST_WORD_ID, 1024) for _ in range(chance.randint(4, 48))),
            text=None,
            sampling=Sampling(temperature=chance.choice([0.0, 0.7, 1.0]), seed=number),
            max_tokens=chance.randint(24, 80),
            ignore_end=chance.random() < 0.5,
        )
        for number in range(count)
    ]


def text_requests(count: int, seed: int) -> list[Request]:
    """Distinct requests to a real model."""
    chance = random.Random(seed)
    return [
        Request(
            None,
            TEXTS[number % len(TEXTS)],
            Sampling(temperature=0.8 * (number % 2), seed=number),
            chance.randint(16, 32),
            True,
        )
        for number in range(count)
    ]


def simulated_outputs(requests: Sequence[Request]) -> list[Output]:
    """The undisturbed outputs: the engine alone, all requests in one batch, token by token, without trees or services."""
    model = SimulatedModel()
    target = SimulatedTarget(model)
    stopping = [
        Stopping(
            StopRules(request.max_tokens, frozenset() if request.ignore_end else frozenset({model.end_token_id})),
            Tokenization.simulated().decoder(),
        )
        for request in requests
    ]
    outputs = [Output((), "") for _ in requests]
    token_of: dict[int, int] = {}
    for number, request in enumerate(requests):
        assert request.token_ids is not None
        num_known = target.open(number, request.token_ids, request.sampling)
        (posterior,) = target.step([PrefillChunk(number, request.token_ids[num_known:], last=True)])
        token_of[number] = posterior.token_ids[0]
    while token_of:
        for number, token_id in list(token_of.items()):
            emission = stopping[number].admit(Commit((token_id,), 1))
            outputs[number] = Output((*outputs[number].token_ids, *emission.token_ids), outputs[number].text + emission.text)
            if emission.finish_reason is not None:
                target.release(number)
                del token_of[number]
        posteriors = target.step([Scoring(number, DraftTree.lone_root(token_id)) for number, token_id in token_of.items()])
        for number, posterior in zip(list(token_of), posteriors, strict=True):
            target.keep(number, Acceptance((0,), posterior.token_ids[0]))
            token_of[number] = posterior.token_ids[0]
    return outputs
