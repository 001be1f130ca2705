"""Draws, log-probs and sampling parameters cross the wire unchanged, and wrong ones are refused by name."""

from __future__ import annotations

import pytest

from treewire import wire
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, DraftTree, Draw, TokenLogProbs
from treewire.errors import InvalidRequest
from treewire.v1 import tree_pb2

TREE = DraftTree((7, 3, 4, 5), (-1, 0, 0, 1), (Draw(2, (4, 9), (-0.5, -1.25)), Draw(3, (5,), (-2.0,))))


def test_a_tree_with_draws() -> None:
    """What was drawn and from what arrives as it was sent."""
    assert wire.tree_from_message(wire.tree_to_message(TREE), max_nodes=9, vocabulary_size=10) == TREE


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (tree_pb2.Draw(node=1), "from 1 to 1024"),
        (tree_pb2.Draw(node=1, token_ids=wire.token_ids_to_bytes([3]), log_probs=b"1234567"), "buffer"),
        (tree_pb2.Draw(node=1, token_ids=wire.token_ids_to_bytes([3, 3]), log_probs=bytes(8)), "twice"),
        (tree_pb2.Draw(node=1, token_ids=wire.token_ids_to_bytes([4]), log_probs=bytes(4)), "cannot give"),
        (tree_pb2.Draw(node=1, token_ids=wire.token_ids_to_bytes([3]), log_probs=b"\x00\x00\xc0\x7f"), "finite"),
        (tree_pb2.Draw(node=1, token_ids=wire.token_ids_to_bytes([11]), log_probs=bytes(4)), "vocabulary"),
        (tree_pb2.Draw(node=4, token_ids=wire.token_ids_to_bytes([3]), log_probs=bytes(4)), "drawn node 4"),
        (tree_pb2.Draw(node=0, token_ids=wire.token_ids_to_bytes([7]), log_probs=bytes(4)), "drawn node 0"),
    ],
)
def test_wrong_draws(draw: tree_pb2.Draw, reason: str) -> None:
    """A draw that cannot have given its node's token, or is no distribution, is refused."""
    message = tree_pb2.DraftTree(token_ids=[7, 3, 4], parents=[-1, 0, 0], draws=[draw])
    with pytest.raises(InvalidRequest, match=reason):
        wire.tree_from_message(message, max_nodes=9, vocabulary_size=10)


def test_two_drawn_children_of_one_node() -> None:
    """The rule knows one drawn child a node."""
    with pytest.raises(ValueError, match="two drawn children"):
        DraftTree((7, 3, 4), (-1, 0, 0), (Draw(1, (3,), (0.0,)), Draw(2, (4,), (0.0,))))


def test_cutting_a_tree_cuts_its_draws() -> None:
    """A smaller budget keeps the draws of the nodes that are left."""
    assert TREE.cut(2).draws == TREE.draws[:1]


def test_15_a_commit_with_log_probs() -> None:
    """Entries arrive aligned with their tokens; a commit with another number of them is refused."""
    commit = Commit((3, 4), 6, (TokenLogProbs(-0.5, (3, 1), (-0.5, -2.0)), TokenLogProbs(-1.5)))
    message = wire.commit_to_message(commit)
    assert wire.commit_from_message(message, previous_length=4, vocabulary_size=10) == commit
    del message.log_probs[1]
    with pytest.raises(InvalidRequest, match="log-probs of 1"):
        wire.commit_from_message(message, previous_length=4, vocabulary_size=10)


def test_11_sampling_is_complete_on_the_wire() -> None:
    """Every parameter arrives, zeros that differ from the defaults included."""
    sampling = Sampling(
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, -100.0), (5, 0.0)),
        min_tokens=4,
        stop_token_ids=(1, 2),
    )
    others = Sampling(temperature=1.0, min_tokens=7)
    assert wire.sampling_from_message(wire.sampling_to_message(sampling), others, vocabulary_size=6) == sampling
    with pytest.raises(InvalidRequest, match="logit_bias: token is 5, it must be from 0 to 4"):
        wire.sampling_from_message(wire.sampling_to_message(sampling), others, vocabulary_size=5)
