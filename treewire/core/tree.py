"""This file is the two nouns of a round, the draft tree and the commit, and the marginals that a tree is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ROOT_PARENT = -1
_WIDEST_DRAW = 700.0  # of log-probs further apart the lower is no probability in float64


@dataclass(frozen=True)
class Draw:
    """A node whose token was drawn at random, and the distribution that it was drawn from: some tokens with log-probs.

    The distribution is that of the log-probs renormalised. Raises ValueError unless its tokens are distinct and its
    log-probs finite.
    """

    node: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.log_probs):
            raise ValueError(f"a draw has {len(self.token_ids)} tokens and {len(self.log_probs)} log-probs")
        if len(set(self.token_ids)) != len(self.token_ids):
            raise ValueError("a draw names a token twice")
        if not np.isfinite(self.log_probs).all():
            raise ValueError("the log-probs of a draw are finite, these are not")
        if max(self.log_probs) - min(self.log_probs) > _WIDEST_DRAW:
            raise ValueError(f"the log-probs of a draw lie within {_WIDEST_DRAW:g} of each other, these do not")

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """Probability of each token, float64 [tokens], summing to 1."""
        weights = np.exp(np.asarray(self.log_probs, np.float64) - max(self.log_probs))
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities


@dataclass(frozen=True)
class DraftTree:
    """A guess at the next tokens: nodes in an order in which parents come first, node 0 the root.

    The root repeats the last committed token. A tree of only the root is a *lone root*: plain decoding. `draws` tells which
    nodes were drawn at random, at most one child of each parent, ascending. Raises ValueError if the parents do not make a
    tree, a token id is negative, or a draw does not have its node's token.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[Draw, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a tree has at least its root, this one has no node")
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"tree has {len(self.token_ids)} tokens but {len(self.parents)} parents")
        if self.parents[0] != ROOT_PARENT:
            raise ValueError(f"node 0 is the root and has parent -1, not {self.parents[0]}")
        if min(self.token_ids) < 0:
            raise ValueError(f"token ids start at 0, the tree has {min(self.token_ids)}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; a parent comes before its children")
        self._check_draws()

    def _check_draws(self) -> None:
        parents: set[int] = set()
        for draw in self.draws:
            if not 0 < draw.node < len(self.token_ids):
                raise ValueError(f"drawn node {draw.node} is not among the nodes from 1 to {len(self.token_ids) - 1}")
            if self.token_ids[draw.node] not in draw.token_ids:
                raise ValueError(f"node {draw.node} has token {self.token_ids[draw.node]}, which its draw cannot give")
            if self.parents[draw.node] in parents:
                raise ValueError(f"node {self.parents[draw.node]} has two drawn children, it may have one")
            parents.add(self.parents[draw.node])

    @classmethod
    def lone_root(cls, token_id: int) -> DraftTree:
        """The tree of only the root."""
        return cls((token_id,), (ROOT_PARENT,))

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self.token_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes, root excluded: what the budget counts."""
        return len(self.token_ids) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def drawn_children(self) -> dict[int, Draw]:
        """The drawn child of each node that has one."""
        return {self.parents[draw.node]: draw for draw in self.draws}

    def cut(self, budget: int) -> DraftTree:
        """The tree of the root and its first `budget` nodes; trees are nested in the order of their nodes.

        Raises ValueError on a negative budget.
        """
        if budget < 0:
            raise ValueError(f"budget is {budget}, it must be at least 0")
        if budget >= self.num_draft_tokens:
            return self
        draws = tuple(draw for draw in self.draws if draw.node <= budget)
        return DraftTree(self.token_ids[: budget + 1], self.parents[: budget + 1], draws)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while (node := self.parents[node]) != ROOT_PARENT:
            nodes.append(node)
        return tuple(reversed(nodes))


@dataclass(frozen=True)
class TokenLogProbs:
    """How likely the target held a token, and its likeliest tokens with log-probs, likeliest first.

    All under the target's own distribution, before any processing.
    """

    log_prob: float
    top_token_ids: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Commit:
    """Tokens that became part of the sequence: the accepted ones, then the bonus token.

    `length` is the length of the committed sequence after them, prompt included. `log_probs` has an entry a token, or none.
    """

    token_ids: tuple[int, ...]
    length: int
    log_probs: tuple[TokenLogProbs, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a commit has at least its bonus token, this one has no token")
        if min(self.token_ids) < 0:
            raise ValueError(f"token ids start at 0, the commit has {min(self.token_ids)}")
        if self.length < len(self.token_ids):
            raise ValueError(f"commit of {len(self.token_ids)} tokens claims a sequence of {self.length}")
        if self.log_probs and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"commit of {len(self.token_ids)} tokens has log-probs of {len(self.log_probs)}")

    @property
    def bonus_token_id(self) -> int:
        """The last token: the root of the next tree."""
        return self.token_ids[-1]


@dataclass(frozen=True, eq=False)
class Marginals:
    """Likeliest tokens for each of the next depths, with log-probabilities normalised over the full vocabulary.

    `token_ids` is int32 and `log_probs` float32, both of shape [rows, width]; each row is best first, equal scores by
    the lower token id. Row 0 describes the children of the root, the rows after it those of every node at depth 1, 2, ...

    The last rows are *conditional* if `prefixes` are given, one a row: such a row describes the children of the node with that
    path of tokens from below the root, in the place of the row of its depth. A conditional row may lie deeper than all depths
    that have a row; the root's children never do.

    A row with fewer tokens than others ends in fillers: other tokens with log-prob -inf, which no tree takes. Raises
    ValueError on other shapes, NaN, positive log-probabilities, negative tokens, a token twice in a row, an empty prefix, one
    that comes twice, or prefixes without a row for the root's children.
    """

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    prefixes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.log_probs.shape:
            raise ValueError(f"marginals have tokens of shape {self.token_ids.shape} and log-probs of {self.log_probs.shape}")
        if self.prefixes:
            self._check_prefixes()
        if self.token_ids.size == 0:
            return
        if self.token_ids.min() < 0:
            raise ValueError(f"token ids start at 0, marginals have {self.token_ids.min()}")
        if not (self.log_probs <= 1e-3).all():  # also catches NaN
            raise ValueError("log-probabilities are at most 0, marginals have a larger one or NaN")
        ordered = np.sort(self.token_ids, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ValueError("marginals name a token twice in one row")

    def _check_prefixes(self) -> None:
        if len(self.prefixes) >= len(self.token_ids):
            raise ValueError(
                f"{len(self.token_ids)} rows with {len(self.prefixes)} prefixes leave none for the root's children"
            )
        if not all(self.prefixes):
            raise ValueError("a prefix has at least one token, an empty one is the root's, whose children have the first row")
        if min(map(min, self.prefixes)) < 0:
            raise ValueError("token ids start at 0, a prefix has a lower one")
        if len(set(self.prefixes)) < len(self.prefixes):
            raise ValueError("marginals have two rows for one prefix")

    @classmethod
    def empty(cls) -> Marginals:
        """No guess at all; builds a lone root."""
        return cls(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[tuple[int, float]]]) -> Marginals:
        """From (token, log-prob) pairs by depth, each row best first and all of one width."""
        shape = (len(rows), len(rows[0]) if rows else 0)
        return cls(
            np.array([[token for token, _ in row] for row in rows], np.int32).reshape(shape),
            np.array([[log_prob for _, log_prob in row] for row in rows], np.float32).reshape(shape),
        )

    @property
    def num_depths(self) -> int:
        """Depths that have a row of their own; conditional rows do not count."""
        return len(self.token_ids) - len(self.prefixes)

    @property
    def row_depths(self) -> NDArray[np.int64]:
        """Depth of the tokens of each row, 1 that of the root's children; int64 [rows]."""
        conditional = [len(prefix) + 1 for prefix in self.prefixes]
        return np.array([*range(1, self.num_depths + 1), *conditional], np.int64)

    @property
    def width(self) -> int:
        """Tokens in each row."""
        return int(self.token_ids.shape[1])
