"""This file is what was said before a token is chosen: the counts that penalties and the least length are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treewire.core.tree import DraftTree
from treewire.core.visibility import visibility


@dataclass(frozen=True, eq=False)
class NodeHistories:
    """What was said before each of some choices, for the tokens that came up anywhere: all others were never said.

    `token_ids` int64 [tokens], distinct and ascending; `in_prompt` bool [tokens]; `output_counts` int64 [nodes, tokens], the
    occurrences in the output of each node's own path; `num_output_tokens` int64 [nodes], the length of that output.
    """

    token_ids: NDArray[np.int64]
    in_prompt: NDArray[np.bool_]
    output_counts: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]


class History:
    """A sequence as counts of its tokens. The last `num_output_tokens` of the tokens given at first count as output."""

    def __init__(self, token_ids: Sequence[int], num_output_tokens: int = 0) -> None:
        start_of_output = len(token_ids) - num_output_tokens
        self._prompt = np.unique(np.asarray(token_ids[:start_of_output], np.int64))
        self._output: Counter[int] = Counter(token_ids[start_of_output:])
        self._num_output_tokens = num_output_tokens

    def copy(self) -> History:
        """A history that goes on by itself."""
        copied = History(())
        copied._prompt, copied._output = self._prompt, self._output.copy()
        copied._num_output_tokens = self._num_output_tokens
        return copied

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the output."""
        for token_id in token_ids:
            self._output[token_id] += 1
            self._num_output_tokens += 1

    def now(self) -> NodeHistories:
        """What was said before the next token: one row."""
        return self._with_paths(np.zeros(0, np.int64), np.zeros((1, 0), np.int64), np.zeros(1, np.int64))

    def over(self, tree: DraftTree) -> NodeHistories:
        """What was said before the token after each node: this history, then the node's path, the root included."""
        token_ids, columns = np.unique(np.asarray(tree.token_ids, np.int64), return_inverse=True)
        said = columns[:, np.newaxis] == np.arange(len(token_ids))
        counts = visibility(tree.parents).astype(np.float32) @ said.astype(np.float32)  # exact: whole numbers below 2**24
        return self._with_paths(token_ids, counts.astype(np.int64), np.asarray(tree.depths, np.int64) + 1)

    def _with_paths(
        self, path_token_ids: NDArray[np.int64], path_counts: NDArray[np.int64], path_lengths: NDArray[np.int64]
    ) -> NodeHistories:
        output = np.fromiter(self._output, np.int64, len(self._output))
        token_ids = np.unique(np.concatenate([self._prompt, output, path_token_ids]))
        counts = np.zeros((len(path_counts), len(token_ids)), np.int64)
        counts[:, np.searchsorted(token_ids, output)] = np.fromiter(self._output.values(), np.int64, len(self._output))
        counts[:, np.searchsorted(token_ids, path_token_ids)] += path_counts
        return NodeHistories(token_ids, np.isin(token_ids, self._prompt), counts, path_lengths + self._num_output_tokens)
