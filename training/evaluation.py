"""This file is the evaluation: tokens a round on the target's own answers, for chains and trees, without the target.

A greedy answer is a fixed path, and so is one that is drawn with shared noise: a tree's acceptance at a position is how far the
path stays inside it. The drafter drafts once after every token of the path; then any rule of building trees is simulated round
by round, exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from treewire.core.build import build_tree
from treewire.core.tree import DraftTree, Marginals


@dataclass(frozen=True, eq=False)
class Guess:
    """What a drafter said after one token: prefixes it expanded, root first, each with its likeliest next tokens.

    `paths[n]` are the tokens from the root (excluded) to prefix n, () for the root itself; `token_ids` int64 and `log_probs`
    float64, [prefixes, width], best first, describe what follows each.
    """

    paths: tuple[tuple[int, ...], ...]
    token_ids: np.ndarray
    log_probs: np.ndarray


Said = TypeVar("Said")


@dataclass(frozen=True, eq=False)
class GuessedAnswer(Generic[Said]):
    """A target's answer with what the drafter said after each of its tokens, the last one excepted."""

    token_ids: tuple[int, ...]
    guesses: tuple[Said, ...]

    def __post_init__(self) -> None:
        if len(self.guesses) != len(self.token_ids) - 1:
            raise ValueError(f"an answer of {len(self.token_ids)} tokens has one guess fewer, not {len(self.guesses)}")


@dataclass(frozen=True)
class Acceptance:
    """Rounds and the tokens they gained, bonus included."""

    num_rounds: int
    num_tokens: int

    @property
    def length(self) -> float:
        """Mean tokens a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0


TreeRule = Callable[[int, Guess], DraftTree]
"""The tree that is built after a token, given what the drafter said there."""


def accepted_tokens(tree: DraftTree, following: Sequence[int]) -> int:
    """How many of the following tokens a tree contains as a path from its root."""
    node, count = 0, 0
    for token_id in following:
        child = next((child for child in tree.children[node] if tree.token_ids[child] == token_id), None)
        if child is None:
            break
        node, count = child, count + 1
    return count


def simulate(answers: Sequence[GuessedAnswer[Said]], rule: Callable[[int, Said], DraftTree]) -> Acceptance:
    """Decode every answer speculatively with the trees of a rule.

    The first token of an answer is the prefill's and not counted; neither are tokens past the end of an answer.
    """
    num_rounds, num_tokens = 0, 0
    for answer in answers:
        position, last = 0, len(answer.token_ids) - 1
        while position < last:
            tree = rule(answer.token_ids[position], answer.guesses[position])
            gained = min(accepted_tokens(tree, answer.token_ids[position + 1 :]) + 1, last - position)
            position, num_rounds, num_tokens = position + gained, num_rounds + 1, num_tokens + gained
    return Acceptance(num_rounds, num_tokens)


def chain_rule(length: int) -> TreeRule:
    """The drafter's best guesses in a row, at most `length`."""

    def build(root_token_id: int, guess: Guess) -> DraftTree:
        rows = _best_path_rows(guess)[:length]
        best = [int(guess.token_ids[row, 0]) for row in rows]
        return DraftTree((root_token_id, *best), tuple(range(-1, len(best))))

    return build


def marginal_rule(budget: int) -> TreeRule:
    """DDTree's best-first tree over the distributions along the drafter's best path, taken as marginals by depth."""

    def build(root_token_id: int, guess: Guess) -> DraftTree:
        rows = _best_path_rows(guess)
        marginals = Marginals(guess.token_ids[rows].astype(np.int32), guess.log_probs[rows].astype(np.float32))
        return build_tree(root_token_id, marginals, budget).tree

    return build


def conditional_rule(budget: int) -> TreeRule:
    """Best-first tree over the prefixes that the drafter expanded: children are scored given their own parent."""

    def build(root_token_id: int, guess: Guess) -> DraftTree:
        rows = {path: row for row, path in enumerate(guess.paths)}
        token_ids, parents = [root_token_id], [-1]
        offers: list[tuple[float, tuple[int, ...], int, int]] = []

        def offer(path: tuple[int, ...], parent: int, rank: int, parent_cost: float) -> None:
            row = rows.get(path)
            if row is not None and rank < guess.token_ids.shape[1]:
                cost = parent_cost - float(guess.log_probs[row, rank])
                heapq.heappush(offers, (cost, (*path, int(guess.token_ids[row, rank])), parent, rank))

        costs = [0.0]
        offer((), 0, 0, 0.0)
        while offers and len(parents) <= budget:
            cost, path, parent, rank = heapq.heappop(offers)
            offer(path[:-1], parent, rank + 1, costs[parent])
            offer(path, len(parents), 0, cost)
            token_ids.append(path[-1])
            parents.append(parent)
            costs.append(cost)
        return DraftTree(tuple(token_ids), tuple(parents))

    return build


def _best_path_rows(guess: Guess) -> list[int]:
    rows = {known: row for row, known in enumerate(guess.paths)}
    path: tuple[int, ...] = ()
    found: list[int] = []
    while (row := rows.get(path)) is not None:
        found.append(row)
        path = (*path, int(guess.token_ids[row, 0]))
    return found
