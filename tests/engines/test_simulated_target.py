"""The simulated target: trees scored like their paths, KV accounted for, faults as scripted."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewire.core.acceptance import Acceptance, accept
from treewire.core.noise import noise_row
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.core.simulated import Prefix, SimulatedDeath, SimulatedModel
from treewire.core.tree import DraftTree
from treewire.kv.pages import KvExhausted
from verify_service.engine import Posterior, PrefillChunk, Scoring
from verify_service.engines.simulated import SimulatedTarget, TargetFaults

PROMPT = (300, 400, 500, 600)
OTHER_PROMPT = (7, 400, 261, 399)
THIRD_PROMPT = (8, 300, 260, 301)
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7)]


def choice(prefix: tuple[int, ...], sampling: Sampling) -> int:
    """The model's token after the prefix, straight from the definition."""
    log_probs = process(SimulatedModel().logits([Prefix.of(prefix)]), sampling)
    noise = None if sampling.is_greedy else noise_row(sampling.seed, len(prefix), 1024)[np.newaxis]
    return int(choose(log_probs, noise)[0])


def prefill(target: SimulatedTarget, session: int, prompt: tuple[int, ...], sampling: Sampling) -> int:
    """Open and prefill a session; the token after the prompt."""
    target.open(session, prompt, sampling)
    return target.step([PrefillChunk(session, prompt, last=True)])[0].token_ids[0]


def score(target: SimulatedTarget, session: int, tree: DraftTree) -> Posterior:
    """One tree through the target."""
    return target.step([Scoring(session, tree)])[0]


@st.composite
def trees(draw: st.DrawFn, root_token_id: int = 300) -> DraftTree:
    """Any tree of up to 12 nodes."""
    num_nodes = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    tokens = [root_token_id, *(draw(st.integers(0, 1023)) for _ in range(1, num_nodes))]
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=30)
@given(tree=trees())
def test_every_node_is_scored_after_its_own_path(sampling: Sampling, tree: DraftTree) -> None:
    """The posterior of a node is the token after prompt + path, greedy and sampled."""
    target = SimulatedTarget(SimulatedModel())
    prefill(target, 1, PROMPT, sampling)
    paths = [tuple(tree.token_ids[node] for node in tree.path(leaf)) for leaf in range(len(tree))]
    assert score(target, 1, tree).token_ids == tuple(choice(PROMPT + path, sampling) for path in paths)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rounds_of_trees_say_what_plain_decoding_says(sampling: Sampling) -> None:
    """Output does not depend on the trees, and kept rows are those of the accepted path."""
    plain = list(PROMPT)
    for _ in range(30):
        plain.append(choice(tuple(plain), sampling))
    target = SimulatedTarget(SimulatedModel())
    committed = [*PROMPT, prefill(target, 1, PROMPT, sampling)]
    while len(committed) < len(plain) - 3:
        known = plain[len(committed)]
        # a right child, a wrong one, and under both the token after the right one
        tree = DraftTree((committed[-1], 5, known, plain[len(committed) + 1], 6), (-1, 0, 0, 2, 1))
        acceptance = accept(tree, score(target, 1, tree).token_ids)
        target.keep(1, acceptance)
        committed.extend(acceptance.token_ids(tree))
        assert target.num_free_slots == (1 << 18) - len(committed) + 1
    assert committed == plain[: len(committed)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_node_probabilities_are_those_of_the_processed_distribution(sampling: Sampling) -> None:
    """Likeliest first, normalised; the sampling chain applied; absent unless asked for."""
    target = SimulatedTarget(SimulatedModel())
    target.open(1, PROMPT, sampling, num_node_probabilities=3)
    posterior = target.step([PrefillChunk(1, PROMPT, last=True)])[0]
    (probabilities,) = posterior.node_probabilities
    logits = process(SimulatedModel().logits([Prefix.of(PROMPT)]), sampling)[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum())
    assert probabilities.token_ids == tuple(np.argsort(-log_probs)[:3])
    np.testing.assert_allclose(probabilities.log_probs, np.sort(log_probs)[::-1][:3], rtol=1e-5, atol=1e-6)
    target.open(2, OTHER_PROMPT, sampling)
    assert target.step([PrefillChunk(2, OTHER_PROMPT, last=True)])[0].node_probabilities == ()


def test_removed_tokens_are_not_named() -> None:
    """Where the chain leaves two tokens, two are named."""
    target = SimulatedTarget(SimulatedModel())
    target.open(1, PROMPT, Sampling(temperature=1.0, top_k=2), num_node_probabilities=5)
    (probabilities,) = target.step([PrefillChunk(1, PROMPT, last=True)])[0].node_probabilities
    assert len(probabilities.token_ids) == 2
    assert np.exp(probabilities.log_probs).sum() == pytest.approx(1.0)


def test_slots_come_back() -> None:
    """Rejected nodes and released sessions give their KV slots back; an unknown session is no error."""
    target = SimulatedTarget(SimulatedModel(), max_tree_nodes=8, kv_tokens=20)
    root = prefill(target, 1, PROMPT, Sampling())
    score(target, 1, DraftTree((root, 5, 6), (-1, 0, 0)))
    assert target.num_free_slots == 20 - 4 - 3
    target.keep(1, Acceptance((0, 2), 9))
    assert target.num_free_slots == 20 - 4 - 2
    target.release(1)
    target.release(1)
    assert (target.num_free_slots, target.num_sessions) == (20, 0)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    """Neither a session nor a tree without room is begun; the same tree fits once a neighbour has gone."""
    target = SimulatedTarget(SimulatedModel(), max_tree_nodes=8, kv_tokens=20)
    root = prefill(target, 1, PROMPT, Sampling())
    prefill(target, 2, OTHER_PROMPT, Sampling())
    with pytest.raises(KvExhausted, match="session 3 needs 13 KV slots, 12 of 20 are free"):
        target.open(3, (9, 9, 9, 9, 5), Sampling())
    trees = [DraftTree((root,) * 8, (-1, *range(7))) for _ in range(2)]
    with pytest.raises(KvExhausted, match="session 2 needs 8 KV slots, 4 of 20 are free"):
        target.step([Scoring(1, trees[0]), Scoring(2, trees[1])])
    assert target.num_free_slots == 12
    target.release(1)
    assert len(score(target, 2, trees[1]).token_ids) == 8


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Scoring(9, DraftTree.lone_root(5)), "session 9 is not open"),
        (Scoring(2, DraftTree.lone_root(5)), "0 of 4 prompt tokens are prefilled"),
        (Scoring(1, DraftTree((5,) * 9, (-1, *range(8)))), "tree has 9 nodes, this target takes 8"),
        (Scoring(1, DraftTree((5,) * 7, (-1, *range(6)))), "a length of 11 tokens, this target's context is 10"),
        (Scoring(1, DraftTree.lone_root(1024)), "token 1024 is not in the vocabulary of 1024"),
        (PrefillChunk(2, OTHER_PROMPT[1:], last=True), "not the prompt's tokens from 0 to 3"),
        (PrefillChunk(2, OTHER_PROMPT[:2], last=True), "up to token 2 of a prompt of 4 has last=True"),
        (PrefillChunk(1, (5,), last=True), "not the prompt's tokens from 4 to 5"),
    ],
)
def test_a_refused_step_changes_nothing(work: PrefillChunk | Scoring, message: str) -> None:
    """Work that does not fit is refused with value and limit, together with good work of its step, which can come again."""
    target = SimulatedTarget(SimulatedModel(), max_tree_nodes=8, max_context=10, kv_tokens=100)
    for session, prompt in ((1, PROMPT), (3, THIRD_PROMPT)):
        prefill(target, session, prompt, Sampling())
    target.open(2, OTHER_PROMPT, Sampling())
    good = Scoring(3, DraftTree.lone_root(5))
    with pytest.raises(ValueError, match=message):
        target.step([good, work])
    assert target.num_free_slots == 100 - 3 * len(PROMPT)
    assert target.step([good])[0].token_ids == (choice((*THIRD_PROMPT, 5), Sampling()),)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampling": Sampling(logit_bias=((1024, 1.0),))}, ValueError, "logit_bias: token is 1024"),
        ({"prompt": ()}, ValueError, "the prompt is empty"),
        ({"prompt": (5,) * 11}, ValueError, "prompt has 11 tokens, this target's context is 10"),
        ({"prompt": (1024,)}, ValueError, "token 1024"),
        ({"num_output_tokens": 5}, ValueError, "num_output_tokens is 5"),
        ({"num_node_probabilities": 1025}, ValueError, "num_node_probabilities is 1025"),
    ],
)
def test_sessions_that_do_not_fit_are_refused(arguments: dict[str, object], error: type[ValueError], message: str) -> None:
    """What a session asks for and the target has not is refused at open, and nothing stays behind."""
    target = SimulatedTarget(SimulatedModel(), max_tree_nodes=8, max_context=10, kv_tokens=100)
    with pytest.raises(error, match=message):
        target.open(1, **{"prompt": PROMPT, "sampling": Sampling(), **arguments})  # type: ignore[arg-type]
    assert (target.num_sessions, target.num_free_slots) == (0, 100)


def test_a_failed_step_can_come_again() -> None:
    """A scripted failure raises once and changes nothing."""
    target = SimulatedTarget(SimulatedModel(), faults=TargetFaults(fail_steps=frozenset({1})))
    prefill(target, 1, PROMPT, Sampling())
    with pytest.raises(RuntimeError, match="simulated fault in step 1"):
        score(target, 1, DraftTree.lone_root(5))
    assert score(target, 1, DraftTree.lone_root(5)).token_ids == (choice((*THIRD_PROMPT, 5), Sampling()),)


def test_a_dead_target_stays_dead() -> None:
    """From its last step on every call raises, except release."""
    target = SimulatedTarget(SimulatedModel(), faults=TargetFaults(die_at_step=1))
    prefill(target, 1, PROMPT, Sampling())
    for _ in range(2):
        with pytest.raises(SimulatedDeath, match="died in step 1"):
            score(target, 1, DraftTree.lone_root(5))
    with pytest.raises(SimulatedDeath, match="died in step 1"):
        target.open(2, PROMPT, Sampling())
    target.release(1)
    assert target.num_sessions == 0


def test_a_step_takes_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of a step is its base and a share for each chunk token and node."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    target = SimulatedTarget(SimulatedModel(), step_seconds=1.0, position_seconds=0.5)
    prefill(target, 1, PROMPT, Sampling())
    score(target, 1, DraftTree((5, 6), (-1, 0)))
    assert slept == [1.0 + 4 * 0.5, 1.0 + 2 * 0.5]


def test_an_empty_step_has_no_posterior() -> None:
    """A step without work is no error."""
    assert SimulatedTarget(SimulatedModel()).step([]) == []


def test_the_simulated_engines_import_no_torch() -> None:
    """Both simulated engines and the n-gram drafter work where torch is not installed."""
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import verify_service.engines.simulated, draft_service.engines.simulated, draft_service.engines.ngram\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
