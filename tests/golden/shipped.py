"""This file is the shipped drafter on a recorded trace of the default target: what it says, and the tokens a round it gains.

The target is not run. Its answers to a few held-out prompts are in the trace, with the hidden states that the drafter taps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draft_service.engine import KV_PAGE_SIZE, KV_TOKENS, Proposal
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.feature_drafter import FeatureDrafter
from treewire.checkpoint import read_config, tapped_layers_of
from treewire.core.build import build_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals
from treewire.kv.pages import PagedKv
from treewire.weights import DEFAULT_MODEL, resolve, resolve_drafter
from verify_service.engines.features import FeatureTaps

FOLDER = Path(__file__).parent / DEFAULT_MODEL
TRACE, EXPECTED = FOLDER / "trace.safetensors", FOLDER / "expected.json"
COMMAND = "python -m tests.golden.record_shipped"
WIDTH = 32
CHAIN = "chain"
RULES = (CHAIN, "tree-4", "tree-16", "conditional-4", "conditional-16")


@dataclass(frozen=True, eq=False)
class Text:
    """A prompt and the target's greedy answer: tokens int64 [positions], outputs of the tapped layers [taps, positions,
    hidden], and what the target held likeliest after each position, int64 [positions], with its log-prob [positions]."""

    token_ids: Tensor
    taps: Tensor
    prompt_length: int
    chosen_ids: Tensor
    chosen_log_probs: Tensor

    @property
    def answer(self) -> list[int]:
        """The target's tokens."""
        answer: list[int] = self.token_ids[self.prompt_length :].tolist()
        return answer


@dataclass(frozen=True)
class Trace:
    """The recorded texts, and the layers that they were tapped at."""

    texts: tuple[Text, ...]
    tapped_layers: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What a drafter gives on the trace: tokens a round by rule, and the log-prob of its best guess after each token of each
    answer."""

    lengths: dict[str, float]
    log_probs: tuple[float, ...]


def load_trace(path: Path = TRACE) -> Trace:
    """The recorded trace."""
    opened: Any = safe_open
    file = opened(path, framework="pt")
    layers = tuple(int(layer) for layer in file.metadata()["tapped_layers"].split())
    count = len([name for name in file.keys() if name.endswith(".token_ids")])  # noqa: SIM118 - no mapping

    def read(number: int) -> Text:
        names = ("token_ids", "taps", "prompt_length", "chosen_ids", "chosen_log_probs")
        token_ids, taps, length, chosen, log_probs = (file.get_tensor(f"{number}.{name}") for name in names)
        return Text(token_ids.long(), taps.float(), int(length), chosen.long(), log_probs.float())

    return Trace(tuple(read(number) for number in range(count)), layers)


def checksum() -> str:
    """SHA-256 of the shipped drafter: its weights and its config."""
    directory = resolve_drafter(DEFAULT_MODEL)
    files = (directory / name for name in ("model.safetensors", "config.json"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def shipped_tapped_layers() -> tuple[int, ...]:
    """The layers that the shipped drafter taps."""
    return tapped_layers_of(read_config(resolve_drafter(DEFAULT_MODEL)))


def load_expected() -> Reading:
    """What the shipped drafter gave when it was recorded. AssertionError if it was another one."""
    noted = json.loads(EXPECTED.read_text())
    assert noted["drafter"] == checksum(), f"drafters/{DEFAULT_MODEL} has changed and was not recorded again: run `{COMMAND}`"
    return Reading(noted["lengths"], tuple(noted["log_probs"]))


def load_drafter(dtype: str = "float32") -> FeatureDrafter:
    """The shipped drafter, its embedding and head the default target's."""
    return load_feature_drafter(resolve_drafter(DEFAULT_MODEL), resolve(DEFAULT_MODEL, quiet=True), dtype=dtype)


def read_drafter(
    engine: FeatureDrafter,
    trace: Trace,
    *,
    rules: Sequence[str] = RULES,
    taps: Callable[[Text], Tensor] = lambda text: text.taps,
    features: Callable[[Tensor], Tensor] = lambda features: features,
) -> Reading:
    """Let the drafter draft after every token of every answer, the texts together, and decode the answers by each rule.

    `taps` may alter what the projection is given, `features` what comes out of it: both are for mistakes.
    """
    projection = FeatureTaps.load(
        resolve_drafter(DEFAULT_MODEL),
        num_layers=max(trace.tapped_layers) + 1,
        hidden_size=trace.texts[0].taps.shape[2],
        device=torch.device("cpu"),
    )
    fused = [features(projection.of_taps(list(taps(text)))) for text in trace.texts]
    said = {
        conditional: _guesses(engine, trace, fused, takes_conditional=conditional)
        for conditional in (False, True)
        if any(rule.startswith("conditional") == conditional for rule in rules)
    }
    lengths = {
        rule: _length([text.answer for text in trace.texts], said[rule.startswith("conditional")], rule) for rule in rules
    }
    guesses = said.get(False) or said[True]
    return Reading(lengths, tuple(float(marginals.log_probs[0, 0]) for answer in guesses for marginals in answer))


def _guesses(
    engine: FeatureDrafter, trace: Trace, features: Sequence[Tensor], *, takes_conditional: bool
) -> list[list[Marginals]]:
    """What the drafter says after each token of each answer but the last, without pages of an earlier reading."""
    engine = FeatureDrafter(engine._network, engine.drafter, PagedKv(KV_TOKENS, KV_PAGE_SIZE))
    guesses: list[list[Marginals]] = [[] for _ in trace.texts]
    for number, text in enumerate(trace.texts):
        engine.start(number, text.token_ids[: text.prompt_length].tolist(), Sampling())
    for step in range(max(len(text.answer) for text in trace.texts) - 1):
        going = [number for number, text in enumerate(trace.texts) if step < len(text.answer) - 1]
        proposals = [_proposal(trace.texts[number], features[number], number, step) for number in going]
        answers = engine.propose([replace(proposal, takes_conditional=takes_conditional) for proposal in proposals])
        for number, answer in zip(going, answers, strict=True):
            guesses[number].append(answer)
    return guesses


def _proposal(text: Text, features: Tensor, session: int, step: int) -> Proposal:
    """The commit of one token of the answer, the first with the features of the whole prompt."""
    length = text.prompt_length + step + 1
    known = length - 2 if step else 0
    return Proposal(session, Commit((text.answer[step],), length), 64, WIDTH, features[known : length - 1].numpy())


def _length(answers: Sequence[Sequence[int]], guesses: Sequence[Sequence[Marginals]], rule: str) -> float:
    """Tokens a round over all answers, bonus included, none past an answer's end."""
    num_tokens = num_rounds = 0
    for answer, said in zip(answers, guesses, strict=True):
        position = 0
        while position < len(said):
            gained = _accepted(said[position], answer[position:], rule) + 1
            num_tokens, num_rounds = num_tokens + min(gained, len(said) - position), num_rounds + 1
            position += gained
    return num_tokens / num_rounds


def _accepted(marginals: Marginals, text: Sequence[int], rule: str) -> int:
    """How many tokens behind the first the rule's tree contains as a path."""
    if rule == CHAIN:
        marginals = Marginals(marginals.token_ids[:, :1], marginals.log_probs[:, :1])
    budget = marginals.num_depths if rule == CHAIN else int(rule.partition("-")[2])
    tree = build_tree(text[0], marginals, budget).tree
    node, count = 0, 0
    for token_id in text[1:]:
        child = next((child for child in tree.children[node] if tree.token_ids[child] == token_id), None)
        if child is None:
            break
        node, count = child, count + 1
    return count
