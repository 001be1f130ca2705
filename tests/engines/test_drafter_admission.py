"""What no drafter takes: sessions, prompts and commits that do not fit or do not follow each other."""

from __future__ import annotations

import pytest

from draft_service.engine import DraftEngine, Proposal
from draft_service.engines.ngram import NgramDrafter
from draft_service.engines.simulated import SimulatedDrafter
from treewire.core.sampling import Sampling
from treewire.core.simulated import SimulatedModel
from treewire.core.tree import Commit


@pytest.fixture
def engine() -> DraftEngine:
    """A drafter with a context of 10 tokens and two sessions of 3 tokens."""
    drafter = SimulatedDrafter(SimulatedModel(), max_context=10)
    for session in (1, 2):
        drafter.start(session, (300, 301, 302), Sampling())
    return drafter


@pytest.mark.parametrize(
    ("session", "prompt", "message"),
    [
        (1, (5,), "session 1 has been started before"),
        (3, (), "a prompt has at least 1 token"),
        (3, (5,) * 11, "prompt has 11 tokens, this drafter follows 10"),
        (3, (1024,), "token 1024 is not in the drafter's vocabulary of 1024"),
        (3, (-1,), "token ids start at 0, not -1"),
    ],
)
def test_a_session_that_does_not_fit_is_refused(
    engine: DraftEngine, session: int, prompt: tuple[int, ...], message: str
) -> None:
    """The message has the value and the limit."""
    with pytest.raises(ValueError, match=message):
        engine.start(session, prompt, Sampling())


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (Proposal(3, Commit((5,), 4), 4, 4), "session 3 has not been started"),
        (Proposal(1, Commit((5,), 4), 4, 4), "one proposal of a session at most"),
        (Proposal(2, Commit((5,), 5), 4, 4), "makes a sequence of 4 tokens but claims 5"),
        (Proposal(2, Commit((5,) * 8, 11), 4, 4), "sequence has 11 tokens, this drafter follows 10"),
        (Proposal(2, Commit((1024,), 4), 4, 4), "token 1024 is not in the drafter's vocabulary"),
        (Proposal(2, Commit((5,), 4), -1, 4), "horizon is -1"),
        (Proposal(2, Commit((5,), 4), 4, 0), "width is 0"),
    ],
)
def test_a_refused_batch_changes_no_session(engine: DraftEngine, proposal: Proposal, message: str) -> None:
    """The good proposal beside the refused one can come again."""
    good = Proposal(1, Commit((5,), 4), 4, 4)
    with pytest.raises(ValueError, match=message):
        engine.propose([good, proposal])
    assert engine.propose([good])[0].num_depths == 4


@pytest.mark.parametrize(("length", "depths"), [(6, 4), (8, 2), (9, 1), (10, 0)])
def test_no_depth_lies_past_the_context(engine: DraftEngine, length: int, depths: int) -> None:
    """Near the longest context the answer gets shorter, and empty at its end."""
    assert engine.propose([Proposal(1, Commit((5,) * (length - 3), length), 4, 4)])[0].num_depths == depths


@pytest.mark.parametrize("engine", [SimulatedDrafter(SimulatedModel()), NgramDrafter()])
def test_a_released_session_is_gone(engine: SimulatedDrafter | NgramDrafter) -> None:
    """Release frees the session, whose number may start again; of an unknown one it is no error."""
    engine.start(1, (5, 5), Sampling())
    assert engine.num_sessions == 1
    engine.release(1)
    engine.release(1)
    assert engine.num_sessions == 0
    engine.start(1, (5, 5), Sampling())
