"""Golden acceptance of the drafter that is shipped for the default target, and every classic mistake caught by it.

Two figures are recorded: tokens a round, and the log-prob of the drafter's best guess after each token. The first is what
counts. The second is there for mistakes that the first hardly feels: hidden states change little from one layer to the next,
and so does attention when all rotary positions are shifted: such a drafter loses a few percent, and nothing else would tell.
Of DFlash's classic mistakes the mask token has no counterpart here; `test_golden_acceptance` has them all.

After a change of `drafters/smollm2-135m`: `python -m tests.golden.record_shipped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.engines.feature_drafter import FeatureDrafter
from draft_service.engines.recurrent import network
from draft_service.engines.recurrent.model import RecurrentDrafter
from tests.golden.shipped import (
    CHAIN,
    RULES,
    TRACE,
    Reading,
    Text,
    Trace,
    load_drafter,
    load_expected,
    load_trace,
    read_drafter,
    shipped_tapped_layers,
)
from treewire.weights import DEFAULT_MODEL, resolve

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

RULE = "tree-16"
TOLERANCE = 0.03  # tokens a round: what another machine's rounding may change
LOG_PROB_TOLERANCE = 0.01  # nats of a log-prob, on average: the same
INT8_TOLERANCE = 0.2  # of both figures, of the weights as they are shipped against float32
LEAST_DAMAGE = 0.2  # tokens a round that a loud mistake costs, far above the tolerance
LEAST_DEVIATION = 0.02  # nats by which a quiet mistake moves log-probs on average: twice the tolerance
MAX_TRACE_BYTES = 1_500_000


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The recorded trace."""
    return load_trace()


@pytest.fixture(scope="module")
def expected() -> Reading:
    """What was recorded of the drafter that is shipped now."""
    return load_expected()


@pytest.fixture(scope="module")
def engine() -> FeatureDrafter:
    """The shipped drafter in float32."""
    return load_drafter()


@pytest.fixture(scope="module")
def hidden_states(trace: Trace) -> list[tuple[Tensor, ...]]:
    """Every layer's output for each text, as transformers counts them: the output of layer i is entry i + 1."""
    model = AutoModelForCausalLM.from_pretrained(resolve(DEFAULT_MODEL, quiet=True), dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=text.token_ids[None], output_hidden_states=True).hidden_states for text in trace.texts]


def deviation(reading: Reading, expected: Reading) -> float:
    """How far the drafter's log-probs are from those recorded, on average, in nats."""
    pairs = zip(reading.log_probs, expected.log_probs, strict=True)
    return sum(abs(first - second) for first, second in pairs) / len(expected.log_probs)


def test_the_shipped_weights_were_recorded(trace: Trace) -> None:
    """The checksum beside the figures is that of the shipped files, and the trace has the layers that they tap."""
    assert set(load_expected().lengths) == set(RULES)
    assert trace.tapped_layers == shipped_tapped_layers()
    assert TRACE.stat().st_size < MAX_TRACE_BYTES


def test_acceptance_is_as_recorded(engine: FeatureDrafter, trace: Trace, expected: Reading) -> None:
    """As chain and as trees, of marginals by depth and of conditional ones: the tokens a round that were recorded."""
    reading = read_drafter(engine, trace)
    assert reading.lengths == pytest.approx(expected.lengths, abs=TOLERANCE)
    assert deviation(reading, expected) < LOG_PROB_TOLERANCE


def test_acceptance_as_shipped(trace: Trace, expected: Reading) -> None:
    """In int8, as the stack runs it, the drafter gains what it gains in float32 but for the rounding of its weights."""
    reading = read_drafter(load_drafter("auto"), trace)
    assert reading.lengths == pytest.approx(expected.lengths, abs=INT8_TOLERANCE)
    assert deviation(reading, expected) < INT8_TOLERANCE


def test_trace_is_worth_something(trace: Trace, expected: Reading) -> None:
    """The answers are the target's own, trees beat the chain, and larger trees beat smaller ones."""
    for text in trace.texts:
        assert text.answer == text.chosen_ids[text.prompt_length - 1 : -1].tolist()
        assert len(text.answer) > 30
        assert text.chosen_log_probs[text.prompt_length :].exp().mean() > 0.3
    lengths = expected.lengths
    assert lengths["conditional-16"] > lengths["conditional-4"] > 1.5
    assert lengths["tree-16"] > lengths[CHAIN] > 1.3


def test_taps_are_those_of_the_target(trace: Trace, hidden_states: list[tuple[Tensor, ...]]) -> None:
    """The recorded outputs are those of the tapped layers and of no neighbour: to half precision, at every position."""
    for text, states in zip(trace.texts, hidden_states, strict=True):
        for tap, layer in zip(text.taps, trace.tapped_layers, strict=True):
            distances = [float((states[layer + shift][0] - tap).norm() / tap.norm()) for shift in (0, 1, 2)]
            assert distances[1] < 2e-3
            assert min(distances[0], distances[2]) > 10 * distances[1]


@pytest.mark.parametrize("shift", [-1, 1])
def test_tap_off_by_one_is_caught(
    shift: int, engine: FeatureDrafter, trace: Trace, expected: Reading, hidden_states: list[tuple[Tensor, ...]]
) -> None:
    """Reading what goes into a tapped layer, or what comes out of the one behind it."""

    def shifted(text: Text) -> Tensor:
        states = hidden_states[trace.texts.index(text)]
        return torch.stack([states[layer + 1 + shift][0] for layer in trace.tapped_layers])

    check_moved(read_drafter(engine, trace, rules=(RULE,), taps=shifted), expected)


def check_moved(reading: Reading, expected: Reading) -> None:
    """Log-probs that the recorded ones tell from what is right."""
    assert deviation(reading, expected) > LEAST_DEVIATION


def check_caught(reading: Reading, expected: Reading) -> None:
    """A length that the recorded one tells from what is right."""
    assert reading.lengths[RULE] < expected.lengths[RULE] - LEAST_DAMAGE


def test_taps_in_another_order_are_caught(engine: FeatureDrafter, trace: Trace, expected: Reading) -> None:
    """The right layers, concatenated in the wrong order."""
    check_caught(read_drafter(engine, trace, rules=(RULE,), taps=lambda text: text.taps.flip(0)), expected)


def test_features_of_the_wrong_positions_are_caught(engine: FeatureDrafter, trace: Trace, expected: Reading) -> None:
    """Each position given the features of the one before it."""
    check_caught(read_drafter(engine, trace, rules=(RULE,), features=lambda rows: torch.roll(rows, 1, dims=0)), expected)


def instead_of_the_anchor(beam: Any) -> list[int]:
    """Tokens of the newest prefixes; in the place of the root's, a token that was not committed last."""
    return [path[-1] if path else 0 for path in beam.paths]


def test_wrong_anchor_token_is_caught(
    engine: FeatureDrafter, trace: Trace, expected: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's row made of another token than the bonus token."""
    monkeypatch.setattr(network._Beam, "token_ids", property(instead_of_the_anchor))
    check_caught(read_drafter(engine, trace, rules=(RULE,)), expected)


def test_missing_embedding_is_caught(
    engine: FeatureDrafter, trace: Trace, expected: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of features alone: the embedding of the anchor, as of every other token, is not in them."""
    monkeypatch.setattr(RecurrentDrafter, "rows", lambda drafter, token_ids, features: drafter.carry(features))
    check_caught(read_drafter(engine, trace, rules=(RULE,)), expected)


def test_carried_output_without_its_norm_is_caught(
    engine: FeatureDrafter, trace: Trace, expected: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafted position given the raw output that guessed it."""
    monkeypatch.setattr(RecurrentDrafter, "carried", lambda drafter, outputs: outputs)
    check_caught(read_drafter(engine, trace, rules=(RULE,)), expected)


@pytest.mark.parametrize("mistake", ["random", "permuted", "first rows"])
def test_wrong_head_is_caught(mistake: str, engine: FeatureDrafter, trace: Trace, expected: Reading) -> None:
    """Logits by another matrix than the candidates' rows of the target's head: not shared, in another order, not selected."""
    drafter = engine._network._model
    generator = torch.Generator().manual_seed(0)
    head = drafter.head.weight
    wrong = {
        "random": torch.randn(head.shape, generator=generator) * head.std(),
        "permuted": head[torch.randperm(len(head), generator=generator)],
        "first rows": drafter.embedding[: len(head)],
    }[mistake]
    with overwritten(head, wrong):
        check_caught(read_drafter(engine, trace, rules=(RULE,)), expected)


def test_candidates_taken_for_token_ids_are_caught(engine: FeatureDrafter, trace: Trace, expected: Reading) -> None:
    """A guess named by its place among the candidates."""
    candidate_ids = engine._network._model.candidate_ids
    with overwritten(candidate_ids, torch.arange(len(candidate_ids))):
        check_caught(read_drafter(engine, trace, rules=(RULE,)), expected)


@contextmanager
def overwritten(tensor: Tensor, wrong: Tensor) -> Iterator[None]:
    """A tensor of the drafter with other values inside the block."""
    right = tensor.clone()
    tensor.copy_(wrong)
    try:
        yield
    finally:
        tensor.copy_(right)


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("drafted rows from 0", lambda beam: len(beam.paths[0])),
        ("drafted rows behind a gap", lambda beam: beam.root.position + 16 + len(beam.paths[0])),
        ("drafted rows one too far", lambda beam: beam.root.position + 1 + len(beam.paths[0])),
    ],
)
def test_wrong_positions_are_caught(
    name: str,
    position: Callable[[Any], int],
    engine: FeatureDrafter,
    trace: Trace,
    expected: Reading,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary positions that are not those of the sequence."""
    monkeypatch.setattr(network._Beam, "position", property(position))
    check_moved(read_drafter(engine, trace, rules=(RULE,)), expected)
