"""The evaluation by simulation, against a naive speculative decoding with the target in the loop."""

from __future__ import annotations

import numpy as np
import torch

from tests.training.conftest import fresh_recipe
from training.batches import Captured
from training.evaluation import Guess, GuessedAnswer, accepted_tokens, chain_rule, conditional_rule, marginal_rule, simulate
from training.report import ngram_length
from training.target import Target
from training.workspace import Workspace
from treewire.core.acceptance import accept
from treewire.core.tree import DraftTree


def one_guess() -> Guess:
    """A guess of two depths along the best path, and one more prefix: after 5, rather 9."""
    token_ids = np.array([[5, 6], [7, 8], [9, 7]])
    return Guess(((), (5,), (6,)), token_ids, np.log([[0.6, 0.4], [0.5, 0.3], [0.9, 0.1]]))


def test_rules_build_the_trees_that_they_name() -> None:
    """The chain follows the best guesses; marginals ignore the parent; conditional guesses follow it."""
    guess = one_guess()
    assert chain_rule(4)(1, guess) == DraftTree((1, 5, 7), (-1, 0, 1))
    assert marginal_rule(4)(1, guess) == DraftTree((1, 5, 6, 7, 7), (-1, 0, 0, 1, 2))
    assert conditional_rule(4)(1, guess) == DraftTree((1, 5, 6, 9, 7), (-1, 0, 0, 2, 1))


def test_conditional_trees_of_equal_guesses_are_those_of_marginals() -> None:
    """Where the next depth does not depend on the token, both rules build the same tree."""
    log_probs = np.log([[0.5, 0.3, 0.2], [0.6, 0.25, 0.15]])
    token_ids = np.array([[3, 4, 5], [6, 7, 8]])
    marginals = Guess(((), (3,)), token_ids, log_probs)
    every = Guess(((), (3,), (4,), (5,)), token_ids[[0, 1, 1, 1]], log_probs[[0, 1, 1, 1]])
    for budget in range(9):
        assert conditional_rule(budget)(1, every) == marginal_rule(budget)(1, marginals)


def test_tokens_past_the_end_of_an_answer_do_not_count() -> None:
    """A round that ends the answer gains what is left of it."""
    guess = one_guess()
    answer = GuessedAnswer((1, 5, 7, 3), (guess, guess, guess))
    assert accepted_tokens(chain_rule(4)(1, guess), (5, 7, 3)) == 2
    assert simulate([answer], chain_rule(4)).length == 3.0
    assert simulate([GuessedAnswer((1, 5, 7), (guess, guess))], chain_rule(4)).length == 2.0


def test_simulated_acceptance_is_that_of_decoding_with_the_target(target: Target, workspace: Workspace) -> None:
    """Rounds and tokens equal those of a loop that asks the target at every node of every tree, with the same guesses."""
    recipe = fresh_recipe(target, workspace)
    held_out = Captured(workspace.held_out_shards)
    batch = held_out.batch(held_out.keys)
    answers = recipe.guess(batch, width=8, beam=3)
    for rule in (chain_rule(3), marginal_rule(6), conditional_rule(6)):
        num_rounds = num_tokens = 0
        for row, answer in enumerate(answers):
            prompt = batch.token_ids[row, : int(batch.prompt_lengths[row])].tolist()
            said = [answer.token_ids[0]]
            while len(said) < len(answer.token_ids):
                tree = rule(said[-1], answer.guesses[len(said) - 1])
                posterior = [greedy_choice(target, [*prompt, *said, *_path_tokens(tree, node)]) for node in range(len(tree))]
                gained = accept(tree, posterior).token_ids(tree)[: len(answer.token_ids) - len(said)]
                said += gained
                num_rounds, num_tokens = num_rounds + 1, num_tokens + len(gained)
            assert tuple(said) == answer.token_ids
        simulated = simulate(answers, rule)
        assert (simulated.num_rounds, simulated.num_tokens) == (num_rounds, num_tokens)


def test_prompt_look_up_finds_what_was_said_before() -> None:
    """A repeated phrase is drafted whole; without repetition every round gains its bonus token alone."""
    assert ngram_length([(1, 2, 3, 4, 5, 6)], [(1, 2, 3, 4, 5, 6)], 3) == 5 / 2
    assert ngram_length([(1, 2)], [(3, 4, 5)], 3) == 1.0


def _path_tokens(tree: DraftTree, node: int) -> list[int]:
    return [tree.token_ids[index] for index in tree.path(node)[1:]]


@torch.inference_mode()
def greedy_choice(target: Target, token_ids: list[int]) -> int:
    """The target's next token after a sequence."""
    return int(target.model(input_ids=torch.tensor([token_ids])).logits[0, -1].argmax())
