"""Where generations end. Numbers in the names are those of the bug reports from the field that each test holds off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stopping import Emission, FinishReason, Stopping, StopRules
from treewire.core.tree import Commit

END = 0


class Letters:
    """A decoder in which token n is the n-th letter and token 0, the end, has no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id - 1) for token_id in token_ids if token_id != END)

    def finish(self) -> str:
        return ""


def letters(text: str) -> tuple[int, ...]:
    """Tokens of a text in which '.' is the end token."""
    return tuple(END if letter == "." else ord(letter) - ord("a") + 1 for letter in text)


def run(commits: Sequence[str], *, max_tokens: int = 100, stop: Sequence[str] = (), end: bool = True) -> list[Emission]:
    """What is emitted of these commits, up to the end of the generation."""
    rules = StopRules(max_tokens, frozenset({END}) if end else frozenset(), tuple(stop))
    stopping, emissions, length = Stopping(rules, Letters()), [], 10
    for commit in commits:
        length += len(commit)
        emissions.append(stopping.admit(Commit(letters(commit), length)))
        if emissions[-1].finish_reason:
            break
    return emissions


def text(emissions: Sequence[Emission]) -> str:
    return "".join(emission.text for emission in emissions)


def tokens(emissions: Sequence[Emission]) -> tuple[int, ...]:
    return tuple(token_id for emission in emissions for token_id in emission.token_ids)


def test_1_stop_string_that_completes_early_in_a_long_commit_is_found() -> None:
    """Every committed token is scanned in order, not only the commit's tail; text ends before the stop string."""
    emissions = run(["a", "bcxydefghij"], stop=["xy"])
    assert text(emissions) == "abc"
    assert emissions[-1].finish_reason is FinishReason.STOP
    assert emissions[-1].stop == "xy"


def test_2_ids_end_at_the_token_that_completes_the_stop_string() -> None:
    """Text, ids and the number of tokens end at the same token."""
    emissions = run(["abxyzz"], stop=["xy"])
    assert tokens(emissions) == letters("abxy")
    assert text(emissions) == "ab"


def test_3_stop_inside_the_budget_wins_over_max_tokens_in_the_same_commit() -> None:
    """A commit that runs past max_tokens does not hide a stop inside the budget."""
    emissions = run(["abxycdefgh"], max_tokens=6, stop=["xy"])
    assert emissions[-1].finish_reason is FinishReason.STOP
    emissions = run(["abcdefxy"], max_tokens=6, stop=["xy"])
    assert emissions[-1].finish_reason is FinishReason.LENGTH
    assert tokens(emissions) == letters("abcdef")


def test_3_stop_at_the_very_last_token_of_the_budget_is_a_stop() -> None:
    """The last token allowed may be the one that stops."""
    assert run(["abxy"], max_tokens=4, stop=["xy"])[-1].finish_reason is FinishReason.STOP
    assert run(["abc."], max_tokens=4)[-1].finish_reason is FinishReason.STOP


def test_4_end_token_in_mid_commit_cuts_there() -> None:
    """Nothing behind the first end token is emitted."""
    emissions = run(["ab.cd"])
    assert tokens(emissions) == letters("ab.")
    assert text(emissions) == "ab"
    assert emissions[-1].finish_reason is FinishReason.STOP


def test_4_end_token_is_passed_over_when_ignored() -> None:
    """Told to ignore the end token, a generation goes on."""
    emissions = run(["ab.cd", "ef"], end=False, max_tokens=6)
    assert tokens(emissions) == letters("ab.cde")
    assert emissions[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("size", range(1, 6))
def test_1_stop_string_across_commits_is_found(size: int) -> None:
    """However the tokens are cut into commits, the text ends before the stop string and nothing of it slips out."""
    whole = "abcxyzw"
    commits = [whole[start : start + size] for start in range(0, len(whole), size)]
    emissions = run(commits, stop=["xyz"])
    assert text(emissions) == "abc"
    assert tokens(emissions) == letters("abcxyz")


def test_held_text_is_emitted_when_the_stop_string_does_not_come() -> None:
    """What might have begun a stop string appears as soon as it cannot, and at the end of the generation."""
    assert [emission.text for emission in run(["ax", "b."], stop=["xy"])] == ["a", "xb"]
    assert text(run(["ax."], stop=["xy"])) == "ax"
    assert text(run(["ax"], stop=["xy"], max_tokens=2)) == "ax"


def test_earliest_stop_string_wins() -> None:
    """Of two stop strings that one token completes, the one that begins first ends the text."""
    emissions = run(["abcd"], stop=["cd", "bcd"])
    assert text(emissions) == "a"
    assert emissions[-1].stop == "bcd"


@given(st.text("abxy.", min_size=1, max_size=40), st.lists(st.integers(1, 5), min_size=40, max_size=40), st.integers(1, 45))
def test_19_result_does_not_depend_on_the_commits(whole: str, sizes: list[int], max_tokens: int) -> None:
    """The sum of the chunks is the whole: cutting the same tokens into other commits changes nothing."""
    commits, start = [], 0
    for size in sizes:
        if start < len(whole):
            commits.append(whole[start : start + size])
        start += size
    burst = run([whole], max_tokens=max_tokens, stop=["xx", "yab"])
    pieces = run(commits, max_tokens=max_tokens, stop=["xx", "yab"])
    ends_inside = burst[-1].finish_reason is not None
    if ends_inside:
        assert text(pieces) == text(burst)
        assert pieces[-1].finish_reason is burst[-1].finish_reason
    assert tokens(pieces) == tokens(burst)


@given(st.text("abxy.", min_size=1, max_size=40), st.integers(1, 45))
def test_text_and_end_agree_with_a_naive_scan(whole: str, max_tokens: int) -> None:
    """The end is the first of: a completed stop string, an end token, the last token of the budget."""
    emissions = run([whole], max_tokens=max_tokens, stop=["xy"])
    expected_text, reason, count = "", None, 0
    for count, letter in enumerate(whole, start=1):
        expected_text += "" if letter == "." else letter
        if "xy" in expected_text:
            expected_text, reason = expected_text[: expected_text.index("xy")], FinishReason.STOP
        elif letter == ".":
            reason = FinishReason.STOP
        elif count == max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            break
    assert emissions[-1].finish_reason is reason
    assert len(tokens(emissions)) == count
    if reason:
        assert text(emissions) == expected_text
