"""This file is acceptance on a recorded trace: how many tokens a round the drafter gains on texts that a target has drawn.

The target is not run. What it said is the text, so a tree's acceptance is how far the text stays inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draft_service.engine import Proposal
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.feature_drafter import FeatureDrafter
from treewire.core.build import build_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, DraftTree
from verify_service.engines.features import FeatureTaps

FOLDER = Path(__file__).parent / "tiny"
PROMPT_LENGTH = 8
WIDTH = 32


@dataclass(frozen=True, eq=False)
class Trace:
    """What a target computed: texts int64 [texts, positions], logits [texts, positions, vocabulary], hidden states [texts,
    layers + 1, positions, hidden] as transformers counts them."""

    token_ids: Tensor
    logits: Tensor
    hidden_states: Tensor


def load_trace(folder: Path = FOLDER) -> Trace:
    """The recorded trace."""
    tensors = load_file(folder / "trace.safetensors")
    return Trace(tensors["token_ids"].long(), tensors["logits"].float(), tensors["hidden_states"].float())


def acceptance_length(
    budget: int,
    *,
    drafter: Path = FOLDER / "drafter",
    target: Path = FOLDER / "target",
    hidden_states: Callable[[Tensor], Tensor] = lambda states: states,
    change: Callable[[Any], None] = lambda model: None,
) -> float:
    """Tokens a round over all texts, bonus included.

    `hidden_states` may alter what the taps are given, [layers + 1, positions, hidden]; `change` the drafting network: both are
    for mistakes.
    """
    trace = load_trace()
    num_layers = trace.hidden_states.shape[1] - 1
    taps = FeatureTaps.load(
        drafter, num_layers=num_layers, hidden_size=trace.hidden_states.shape[3], device=torch.device("cpu")
    )
    engine = load_feature_drafter(drafter, target, width=WIDTH)
    change(engine)
    num_tokens = num_rounds = 0
    for text, states in zip(trace.token_ids, trace.hidden_states, strict=True):
        layers = [layer[None] for layer in hidden_states(states)]
        features = taps.of_hidden_states(layers, torch.arange(len(text)))
        gained = _gains(engine, text.tolist(), features, budget)
        num_tokens, num_rounds = num_tokens + sum(gained), num_rounds + len(gained)
    return num_tokens / num_rounds


def _gains(engine: FeatureDrafter, text: list[int], features: Tensor, budget: int) -> list[int]:
    """Tokens gained in each round of a text, as far as every tree has its full depth to prove itself."""
    engine.start(1, text[:PROMPT_LENGTH], Sampling())
    committed, known, gains = PROMPT_LENGTH + 1, 0, []
    last = PROMPT_LENGTH
    while committed + engine.drafter.horizon < len(text):
        new = features[known : committed - 1].numpy()
        commit = Commit(tuple(text[last:committed]), committed)
        (marginals,) = engine.propose([Proposal(1, commit, engine.drafter.horizon, WIDTH, new)])
        known, last = committed - 1, committed
        tree = build_tree(text[committed - 1], marginals, budget).tree
        gains.append(_accepted(tree, text[committed:]) + 1)
        committed += gains[-1]
    engine.release(1)
    return gains


def _accepted(tree: DraftTree, following: list[int]) -> int:
    node, count = 0, 0
    for token_id in following:
        child = next((child for child in tree.children[node] if tree.token_ids[child] == token_id), None)
        if child is None:
            break
        node, count = child, count + 1
    return count
