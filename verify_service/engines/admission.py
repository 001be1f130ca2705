"""This file is what a target checks before it works: that sessions, chunks and trees fit it and come in order."""

from __future__ import annotations

from collections.abc import Sequence

from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import PrefillChunk, Target


def check_open(
    target: Target, prompt: Sequence[int], sampling: Sampling, num_output_tokens: int, num_node_probabilities: int
) -> None:
    """Raises ValueError for a prompt, a count or a parameter's token that does not fit."""
    if not prompt:
        raise ValueError("the prompt is empty, it must have at least 1 token")
    if len(prompt) > target.max_context:
        raise ValueError(f"prompt has {len(prompt):,} tokens, this target's context is {target.max_context:,}")
    check_token_ids(prompt, target.vocabulary_size)
    sampling.check_vocabulary(target.vocabulary_size)
    if not 0 <= num_output_tokens <= len(prompt):
        raise ValueError(f"num_output_tokens is {num_output_tokens}, it must be from 0 to the prompt's {len(prompt)}")
    if not 0 <= num_node_probabilities <= target.vocabulary_size:
        raise ValueError(f"num_node_probabilities is {num_node_probabilities}, it must be from 0 to {target.vocabulary_size}")


def check_chunk(prompt: Sequence[int], num_prefilled: int, chunk: PrefillChunk) -> None:
    """Raises ValueError unless the chunk is the prompt's next tokens, and `last` if they are its last."""
    stop = num_prefilled + len(chunk.token_ids)
    if not chunk.token_ids or tuple(prompt[num_prefilled:stop]) != chunk.token_ids:
        raise ValueError(f"the chunk is not the prompt's tokens from {num_prefilled} to {stop}")
    if chunk.last != (stop == len(prompt)):
        raise ValueError(f"a chunk up to token {stop} of a prompt of {len(prompt)} has last={chunk.last}")


def check_tree(target: Target, num_committed: int, tree: DraftTree) -> None:
    """Raises ValueError unless the tree fits the target after `num_committed` tokens, its root not among them."""
    if len(tree) > target.max_tree_nodes:
        raise ValueError(f"tree has {len(tree):,} nodes, this target takes {target.max_tree_nodes:,}")
    length = num_committed + 1 + max(tree.depths)
    if length > target.max_context:
        raise ValueError(f"tree reaches a length of {length:,} tokens, this target's context is {target.max_context:,}")
    check_token_ids(tree.token_ids, target.vocabulary_size)


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int) -> None:
    """Raises ValueError if a token is not in the vocabulary."""
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocabulary_size:
            raise ValueError(f"token {token_id} is not in the vocabulary of {vocabulary_size} tokens")
