"""The simulated language model: a pure function of the prefix, shaped like a language."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewire.core.simulated import FIRST_BYTE_ID, FIRST_WORD_ID, Prefix, SimulatedModel

TOKENS = st.lists(st.integers(0, 1023), max_size=20)


def greedy(model: SimulatedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's greedy continuation."""
    prefix, token_ids = Prefix.of(prompt), []
    for _ in range(num_tokens):
        token_ids.append(int(model.logits([prefix])[0].argmax()))
        prefix = prefix.extend(token_ids[-1:])
    return token_ids


@given(TOKENS, TOKENS)
def test_a_prefix_grown_in_pieces_is_the_prefix_grown_at_once(head: list[int], tail: list[int]) -> None:
    """The state does not depend on how the tokens came."""
    assert Prefix.of(head).extend(tail) == Prefix.of(head + tail)


@given(st.lists(TOKENS, min_size=1, max_size=6))
def test_logits_do_not_depend_on_the_batch(prompts: list[list[int]]) -> None:
    """A prefix has bit for bit the same logits alone and among others, from any instance of the model."""
    prefixes = [Prefix.of(prompt) for prompt in prompts]
    together = SimulatedModel(seed=5).logits(prefixes)
    assert together.dtype == np.float32
    assert together.shape == (len(prompts), 1024)
    for prefix, row in zip(prefixes, together, strict=True):
        np.testing.assert_array_equal(SimulatedModel(seed=5).logits([prefix])[0], row)


@given(st.lists(st.integers(0, 1023), min_size=1, max_size=20), st.data())
def test_any_changed_token_changes_the_logits(prompt: list[int], data: st.DataObject) -> None:
    """A wrong token anywhere in the prefix cannot go unnoticed."""
    place = data.draw(st.integers(0, len(prompt) - 1))
    changed = [*prompt[:place], (prompt[place] + 1) % 1024, *prompt[place + 1 :]]
    model = SimulatedModel()
    assert (model.logits([Prefix.of(prompt)]) != model.logits([Prefix.of(changed)])).any()


def test_another_seed_is_another_model() -> None:
    """Seeds make models that say different things."""
    assert greedy(SimulatedModel(seed=0), [300], 20) != greedy(SimulatedModel(seed=1), [300], 20)


def test_it_speaks_mostly_words_and_some_bytes() -> None:
    """Tokens 0 and 1 never come; a few in a hundred are bytes, whole characters of UTF-8 and broken ones among them."""
    token_ids = greedy(SimulatedModel(seed=3, mean_length=math.inf), [300], 4000)
    is_byte = [FIRST_BYTE_ID <= token_id < FIRST_WORD_ID for token_id in token_ids]
    assert not {0, 1, 2} & set(token_ids)
    assert 0.005 < np.mean(is_byte) < 0.1
    text = b"".join(bytes([t - FIRST_BYTE_ID]) if b else b"_" for t, b in zip(token_ids, is_byte, strict=True))
    characters = set(text.decode("utf-8", "replace"))
    assert "\ufffd" in characters
    assert any(ord(character) > 127 and character != "\ufffd" for character in characters)


def test_it_is_as_peaked_as_a_language() -> None:
    """The best token has about half of the probability, and phrases come again."""
    model = SimulatedModel(seed=3)
    logits = model.logits([Prefix.of([300 + i, 301 + 2 * i]) for i in range(300)]).astype(np.float64)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    assert 0.4 < np.median(probabilities.max(axis=1)) < 0.7
    token_ids = greedy(model, [300], 1000)
    assert len(set(pairwise(token_ids))) < 700


@pytest.mark.parametrize("mean_length", [10.0, 50.0])
def test_the_end_comes_after_the_mean_length(mean_length: float) -> None:
    """The end token is chosen once in `mean_length` tokens, within four standard deviations."""
    model = SimulatedModel(mean_length=mean_length)
    num_tokens = 4000
    num_ends = greedy(model, [300], num_tokens).count(model.end_token_id)
    expected = num_tokens / mean_length
    assert abs(num_ends - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 259}, "vocabulary size is 259"),
        ({"end_token_id": 1024}, "end token is 1024"),
        ({"mean_length": 0.5}, "mean length is 0.5"),
        ({"mean_length": math.nan}, "mean length is nan"),
    ],
)
def test_impossible_models_are_refused(arguments: dict[str, float], message: str) -> None:
    """A model that cannot be is refused with the value."""
    with pytest.raises(ValueError, match=message):
        SimulatedModel(**arguments)  # type: ignore[arg-type]
