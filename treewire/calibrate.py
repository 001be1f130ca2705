"""This file is how weights of branch scores are fitted to a running stack: prompts in, a TOML file for the gateway out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from treewire.client import Client
from treewire.core.build import BranchWeights
from treewire.core.calibration import Choice, choices_of_round
from treewire.core.tree import DraftTree
from treewire.events import Round, Started
from treewire.types import Sampling


def recorded_choices(
    client: Client, prompts: Iterable[str], temperatures: Iterable[float], *, max_tokens: int, budget: int | None
) -> Iterator[Choice]:
    """Generate an answer to every prompt at every temperature and read the choices off its rounds."""
    temperatures = tuple(temperatures)
    for prompt in prompts:
        for temperature in temperatures:
            sampling = Sampling(temperature=temperature)
            with client.stream(prompt, sampling=sampling, max_tokens=max_tokens, budget=budget, include_rounds=True) as stream:
                seed = 0
                for event in stream:
                    if isinstance(event, Started):
                        seed = event.seed
                    elif isinstance(event, Round):
                        yield from _choices(event, seed, temperature)


def _choices(event: Round, seed: int, temperature: float) -> Iterator[Choice]:
    tree = DraftTree(event.token_ids, event.parents)
    committed = event.committed_token_ids
    return choices_of_round(tree, event.scores, committed, seed, event.length - len(committed) - 1, temperature)


def to_toml(weights: BranchWeights, *, num_choices: int) -> str:
    """Settings of the gateway with these weights."""
    return (
        f"# Fitted to {num_choices} choices by treewire calibrate; for `python -m gateway --config`.\n"
        f"log_prob_weight = {weights.log_prob:.3f}\n"
        f"noise_weight = {weights.noise:.3f}\n"
    )
