"""What the ablation of sampling counts on paths is what the rounds themselves would give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.ablation.drafts import drafted
from benchmarks.ablation.paths import Path, follow
from benchmarks.ablation.rules import NO_TOKEN, Spot, chain_rule, hybrid_rule, noise_rule, plain_rule
from benchmarks.ablation.sampling import Cell, as_it_is, deaf, table
from draft_service.engine import Proposal
from draft_service.engines.simulated import SimulatedDrafter
from training.evaluation import accepted_tokens, simulate
from treewire.core.acceptance import accept
from treewire.core.build import USUAL_WEIGHTS, build_tree, perturb
from treewire.core.hybrid import accept_hybrid, build_hybrid_tree
from treewire.core.sampling import Sampling
from treewire.core.simulated import SimulatedModel
from treewire.core.tree import Commit, Marginals
from verify_service.engine import PrefillChunk, Scoring
from verify_service.engines.simulated import SimulatedTarget

MODEL = SimulatedModel()
PROMPTS = [(5, 300 + number, 301) for number in range(4)]
MAX_TOKENS = 24
BUDGET = 12


def paths_of(temperature: float) -> list[Path]:
    """The simulated target's paths."""
    return follow(SimulatedTarget(MODEL), PROMPTS, Sampling(temperature=temperature), MAX_TOKENS)


def rounds_with_a_target(path: Path, temperature: float) -> list[int]:
    """Tokens gained in each round of real speculative decoding, target and drafter taking turns."""
    target, drafter = SimulatedTarget(MODEL), SimulatedDrafter(MODEL)
    target.open(1, path.prompt, path.sampling)
    drafter.start(1, path.prompt, path.sampling)
    (posterior,) = target.step([PrefillChunk(1, path.prompt, last=True)])
    output, commit, gained = [posterior.token_ids[0]], (posterior.token_ids[0],), []
    while len(output) < len(path.token_ids):
        length = len(path.prompt) + len(output)
        (marginals,) = drafter.propose([Proposal(1, Commit(commit, length), drafter.drafter.horizon, 16)])
        scores = perturb(marginals, path.sampling.seed, length - 1, USUAL_WEIGHTS.at(temperature)) if temperature else None
        tree = build_tree(output[-1], marginals, BUDGET, branch_scores=scores).tree
        (posterior,) = target.step([Scoring(1, tree)])
        acceptance = accept(tree, posterior.token_ids)
        target.keep(1, acceptance)
        commit = acceptance.token_ids(tree)
        output += commit
        gained.append(len(commit))
    gained[-1] -= len(output) - len(path.token_ids)
    assert tuple(output[: len(path.token_ids)]) == path.token_ids
    return gained


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rounds_along_paths_are_the_rounds_that_a_target_takes(temperature: float) -> None:
    """As many rounds, and tokens, as speculative decoding with the same trees."""
    paths = paths_of(temperature)
    answers = drafted(SimulatedDrafter(MODEL), paths, told=as_it_is, width=16, takes_conditional=True)
    rule = noise_rule(BUDGET, USUAL_WEIGHTS) if temperature else plain_rule(BUDGET)
    for path, answer in zip(paths, answers, strict=True):
        gained = rounds_with_a_target(path, temperature)
        found = simulate([answer], rule)
        assert (found.num_rounds, found.num_tokens) == (len(gained), sum(gained))


def test_paths_know_the_probabilities_of_their_tokens() -> None:
    """Those of the processed distribution, which are certain for greedy ones; every prompt has a seed of its own."""
    sampled = paths_of(1.0)
    assert all(path.probabilities.tolist() == [1.0] * len(path.token_ids) for path in paths_of(0.0))
    assert all((path.probabilities > 0).all() and (path.probabilities < 1).any() for path in sampled)
    assert len({path.sampling.seed for path in sampled}) == len(sampled)


def test_chains_are_the_best_token_of_each_depth() -> None:
    """Of the rows as they are ranked, not of log-probs."""
    marginals = Marginals.from_rows([[(4, -2.0), (5, -0.1)], [(6, -1.0), (7, -0.5)]])
    spot = Spot(marginals, 0, 1.0, 10, (), np.zeros(0))
    assert chain_rule(8)(3, spot).token_ids == (3, 4, 6)
    assert chain_rule(1)(3, spot).token_ids == (3, 4)


DRAFTED = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2]])
TARGET = np.array([[0.1, 0.3, 0.15, 0.45], [0.5, 0.2, 0.2, 0.1], [0.25, 0.05, 0.6, 0.1]])
NUM_SAMPLES = 600


def accepted_by_rounds(width: int, budget: int, seeds: Sequence[int]) -> np.ndarray:
    """How often the rule itself accepts 0, 1, ... drafted tokens of a target that has the same law after every token."""
    counts = np.zeros(len(TARGET) + 1)
    for seed in seeds:
        rng = np.random.default_rng([1, seed])
        tree = build_hybrid_tree(9, _marginals(), budget, width=width, seed=seed, root_position=20).tree
        depths = np.minimum(tree.depths, len(TARGET) - 1)
        samples = [int(rng.choice(4, p=TARGET[depth])) for depth in depths]
        walked = accept_hybrid(
            tree,
            samples,
            lambda node, depths=depths: TARGET[depths[node]],
            seed=seed,
            root_position=20,  # type: ignore[misc]
        )
        counts[len(walked.nodes) - 1] += 1
    return counts / len(seeds)


def accepted_on_paths(width: int, budget: int, seeds: Sequence[int]) -> np.ndarray:
    """The same of the ablation, on tokens that the target draws by itself."""
    counts = np.zeros(len(TARGET) + 1)
    for seed in seeds:
        rng = np.random.default_rng([2, seed])
        following = tuple(int(rng.choice(4, p=row)) for row in TARGET)
        probabilities = TARGET[range(len(TARGET)), following]
        tree = hybrid_rule(budget, width)(9, Spot(_marginals(), seed, 1.0, 20, following, probabilities))
        counts[accepted_tokens(tree, following)] += 1
    return counts / len(seeds)


def _marginals() -> Marginals:
    order = np.argsort(-DRAFTED, axis=1, kind="stable")
    return Marginals(order.astype(np.int32), np.log(np.take_along_axis(DRAFTED, order, 1)).astype(np.float32))


@pytest.mark.parametrize(("width", "budget"), [(1, 3), (2, 5), (3, 12)])
def test_hybrid_rejection_along_a_path_has_the_law_of_its_own_rounds(width: int, budget: int) -> None:
    """The share of rounds that accept each number of tokens, chain and trees, within five standard errors."""
    own = accepted_by_rounds(width, budget, range(NUM_SAMPLES))
    along = accepted_on_paths(width, budget, range(NUM_SAMPLES, 2 * NUM_SAMPLES))
    assert own[0] > 0.05
    assert own[1] > 0.05
    np.testing.assert_array_less(np.abs(own - along), 5 * np.sqrt((own + 1e-3) * 2 / NUM_SAMPLES))


def test_draws_that_were_rejected_match_nothing() -> None:
    """In the place of a drawn node stands the path's token or none at all."""
    spot = Spot(_marginals(), 7, 1.0, 20, (3, 3, 3), np.array([1.0, 1.0, 1e-9]))
    first, second, third = hybrid_rule(3, 1)(9, spot).token_ids[1:]
    assert {first, second} <= {3, NO_TOKEN}
    assert third == 3  # a token that the drafter held likelier than the target did always came as a draw


def test_drafters_that_are_told_less_draw_for_that() -> None:
    """Without the noise rows rank by log-prob."""
    (path,) = follow(SimulatedTarget(MODEL), PROMPTS[:1], Sampling(temperature=1.0), MAX_TOKENS)
    (answer,) = drafted(SimulatedDrafter(MODEL), [path], told=deaf, width=8, takes_conditional=True)
    rows = np.concatenate([spot.marginals.log_probs for spot in answer.guesses])
    assert (np.diff(rows, axis=1) <= 0).all()


def test_a_table_has_a_line_a_rule_and_a_column_a_shape() -> None:
    """Tokens over rounds of all prompts, empty where nothing was measured."""
    cells = [Cell("1", "plain", "chain", (3, 5), (2, 2)), Cell("1", "plain", "B = 16", (9, 9), (3, 3))]
    assert table("T", cells).splitlines()[2] == "| 1 | plain | 2.00 |  | 3.00 |  |"
    assert cells[1].standard_error == 0.0
    assert cells[0].standard_error == pytest.approx(0.5)
