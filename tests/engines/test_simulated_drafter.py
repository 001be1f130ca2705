"""The simulated drafter: as right as asked, aimed at the target's own choice, and broken on request."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.engine import Proposal
from draft_service.engines.simulated import DrafterFaults, SimulatedDrafter
from treewire.core.noise import noise_row
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.core.simulated import Prefix, SimulatedDeath, SimulatedModel
from treewire.core.tree import Commit

PROMPT = (300, 400, 500)
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=11)


def choices(prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> list[int]:
    """What the target says after the prompt."""
    model, token_ids = SimulatedModel(), list(prompt)
    for _ in range(num_tokens):
        log_probs = process(model.logits([Prefix.of(token_ids)]), sampling)
        noise = None if sampling.is_greedy else noise_row(sampling.seed, len(token_ids), 1024)[np.newaxis]
        token_ids.append(int(choose(log_probs, noise)[0]))
    return token_ids[len(prompt) :]


def first_proposal(session: int, commit: Commit, horizon: int = 7) -> Proposal:
    """A proposal of the usual width."""
    return Proposal(session, commit, horizon, 16)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_full_agreement_knows_the_targets_choices(sampling: Sampling) -> None:
    """With agreement 1 the best token of each depth is what the target will say, greedy and sampled."""
    said = choices(PROMPT, sampling, 20)
    drafter = SimulatedDrafter(SimulatedModel(), agreement=1.0)
    drafter.start(1, PROMPT, sampling)
    for start, stop in ((0, 1), (1, 4), (4, 12)):
        commit = Commit(tuple(said[start:stop]), len(PROMPT) + stop)
        (marginals,) = drafter.propose([first_proposal(1, commit)])
        assert marginals.token_ids.shape == (7, 16)
        assert marginals.token_ids[:, 0].tolist() == said[stop : stop + 7]


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8])
def test_the_best_token_is_right_as_often_as_asked(agreement: float) -> None:
    """Over many prompts the first depth is the target's choice with the agreement asked for, within four deviations."""
    drafter = SimulatedDrafter(SimulatedModel(), agreement=agreement, horizon=1)
    num_prompts, num_right = 600, 0
    for session in range(num_prompts):
        prompt = (300 + session, 301)
        drafter.start(session, prompt, GREEDY)
        (marginals,) = drafter.propose([first_proposal(session, Commit((302,), 3))])
        num_right += int(marginals.token_ids[0, 0]) == choices((*prompt, 302), GREEDY, 1)[0]
        drafter.release(session)
    assert abs(num_right / num_prompts - agreement) < 4 * np.sqrt(0.25 / num_prompts)


def test_a_session_alone_is_the_session_in_a_batch() -> None:
    """Seeded drafts do not depend on neighbours, nor on the horizon that these ask for."""
    commits = {session: Commit((300 + session,), 4) for session in range(4)}
    samplings = [SAMPLED, GREEDY, Sampling(temperature=1.5, seed=3), SAMPLED]
    batched = SimulatedDrafter(SimulatedModel())
    for session in commits:
        batched.start(session, PROMPT, samplings[session])
    together = batched.propose([first_proposal(session, commit, 3 + session) for session, commit in commits.items()])
    for session, marginals in enumerate(together):
        alone = SimulatedDrafter(SimulatedModel())
        alone.start(session, PROMPT, samplings[session])
        (expected,) = alone.propose([first_proposal(session, commits[session], 3 + session)])
        np.testing.assert_array_equal(marginals.token_ids, expected.token_ids)
        np.testing.assert_array_equal(marginals.log_probs, expected.log_probs)


def test_every_nth_answer_is_malformed() -> None:
    """Scripted answers hold NaN, which the constructor of marginals would not take; the others are whole."""
    drafter = SimulatedDrafter(SimulatedModel(), faults=DrafterFaults(malformed_every=2))
    drafter.start(1, PROMPT, GREEDY)
    answers = [drafter.propose([first_proposal(1, Commit((5,), length))])[0] for length in range(4, 8)]
    assert [bool(np.isnan(answer.log_probs).all()) for answer in answers] == [False, True, False, True]


def test_scripted_steps_fail_and_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step changes nothing and can come again; steps sleep as scripted."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    faults = DrafterFaults(step_seconds=0.5, hang_steps=frozenset({1}), hang_seconds=30.0, fail_steps=frozenset({0}))
    drafter = SimulatedDrafter(SimulatedModel(), faults=faults)
    drafter.start(1, PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="simulated fault in step 0"):
        drafter.propose([first_proposal(1, Commit((5,), 4))])
    assert drafter.propose([first_proposal(1, Commit((5,), 4))])[0].num_depths == 7
    assert slept == [0.5, 30.5]


def test_a_dead_drafter_stays_dead() -> None:
    """From its last step on every call raises, except release."""
    drafter = SimulatedDrafter(SimulatedModel(), faults=DrafterFaults(die_at_step=1))
    drafter.start(1, PROMPT, GREEDY)
    drafter.propose([first_proposal(1, Commit((5,), 4))])
    for _ in range(2):
        with pytest.raises(SimulatedDeath, match="died in step 1"):
            drafter.propose([first_proposal(1, Commit((5,), 5))])
    with pytest.raises(SimulatedDeath, match="died in step 1"):
        drafter.start(2, PROMPT, GREEDY)
    drafter.release(1)
    assert drafter.num_sessions == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"agreement": 1.5}, "agreement is 1.5"), ({"horizon": 0}, "horizon 0"), ({"width": 1025}, "width 1025")],
)
def test_impossible_drafters_are_refused(arguments: dict[str, float], message: str) -> None:
    """What cannot be drafted is refused with the value."""
    with pytest.raises(ValueError, match=message):
        SimulatedDrafter(SimulatedModel(), **arguments)  # type: ignore[arg-type]
