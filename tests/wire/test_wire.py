"""Messages and core types: what crosses comes out equal, what is wrong is refused with field, value and limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewire import wire
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, DraftTree, Marginals
from treewire.errors import Incompatible, InvalidRequest
from treewire.v1 import tree_pb2

token_ids = st.integers(0, 999)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree of up to 30 nodes."""
    size = draw(st.integers(1, 30))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    return DraftTree(tuple(draw(token_ids) for _ in range(size)), parents)


@given(trees())
def test_trees_survive_the_crossing(tree: DraftTree) -> None:
    """A tree comes out as it went in."""
    message = tree_pb2.DraftTree.FromString(wire.tree_to_message(tree).SerializeToString())
    assert wire.tree_from_message(message, max_nodes=30, vocabulary_size=1000) == tree


@given(st.integers(0, 6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_marginals_survive_the_crossing_in_any_number_of_blocks(depths: int, width: int, seed: int) -> None:
    """One block or one a depth: the same proposal."""
    random = np.random.default_rng(seed)
    tokens = np.array([random.choice(1000, width, replace=False) for _ in range(depths)], np.int32).reshape(depths, width)
    marginals = Marginals(tokens, -random.exponential(size=(depths, width)).astype(np.float32))
    whole = [*wire.marginals_to_messages(marginals)]
    rows = [
        tree_pb2.Marginals(
            first_depth=depth + 1,
            width=width,
            token_ids=tokens[depth].tobytes(),
            log_probs=marginals.log_probs[depth].tobytes(),
        )
        for depth in range(depths)
    ]
    for messages in (whole, rows) if depths else (whole,):
        received = wire.marginals_from_messages(messages, max_depths=6, max_width=8, vocabulary_size=1000)
        if depths:
            assert (received.token_ids == tokens).all()
            assert (received.log_probs == marginals.log_probs).all()
        else:
            assert received.num_depths == 0


@given(
    st.builds(Sampling, temperature=st.sampled_from([0.0, 0.5, 1.0]), top_k=st.integers(0, 50), seed=st.integers(0, 2**64 - 1))
)
def test_sampling_survives_the_crossing(sampling: Sampling) -> None:
    """Complete parameters come out as they went in, zeros included."""
    other_defaults = Sampling(temperature=2.0, top_k=7, seed=3)
    assert wire.sampling_from_message(wire.sampling_to_message(sampling), other_defaults) == sampling


def test_unset_sampling_takes_the_defaults() -> None:
    """An unset temperature is the default's, a temperature of zero is zero."""
    defaults = Sampling(temperature=0.5)
    assert wire.sampling_from_message(tree_pb2.Sampling(), defaults) == defaults
    assert wire.sampling_from_message(tree_pb2.Sampling(temperature=0.0), defaults).temperature == 0.0


def test_29_tree_above_the_limit_is_refused_with_value_and_limit() -> None:
    """More nodes than the target takes: both numbers are told."""
    tree = DraftTree((1,) * 1200, (-1, *range(1199)))
    with pytest.raises(InvalidRequest, match="tree has 1,200 nodes, this target takes 1,024"):
        wire.tree_from_message(wire.tree_to_message(tree), max_nodes=1024, vocabulary_size=10)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "no node"),
        ([1, 2], [-1], "2 tokens but 1 parents"),
        ([1, 2], [0, 0], "node 0 is the root"),
        ([1, 2], [-1, 1], "node 1 has parent 1"),
        ([1, 2], [-1, -1], "node 1 has parent -1"),
        ([1, -2], [-1, 0], "token ids start at 0"),
        ([1, 99], [-1, 0], "token 99, the vocabulary has ids from 0 to 9"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], message: str) -> None:
    """Each way of not being a tree has its own words."""
    with pytest.raises(InvalidRequest, match=message):
        wire.tree_from_message(tree_pb2.DraftTree(token_ids=tokens, parents=parents), max_nodes=10, vocabulary_size=10)


def test_commit_that_does_not_follow_is_refused() -> None:
    """A gap in the lengths is FAILED_PRECONDITION, never silent."""
    message = wire.commit_to_message(Commit((1, 2), 12))
    assert wire.commit_from_message(message, previous_length=10, vocabulary_size=10).length == 12
    with pytest.raises(Incompatible, match="ends at length 12, but 2 tokens after 9 end at 11"):
        wire.commit_from_message(message, previous_length=9, vocabulary_size=10)


def block(**changes: object) -> tree_pb2.Marginals:
    """A sound block of one depth and two tokens, changed."""
    fields = {
        "first_depth": 1,
        "width": 2,
        "token_ids": np.array([1, 2], "<i4").tobytes(),
        "log_probs": np.array([-1, -2], "<f4").tobytes(),
        "last": True,
    }
    return tree_pb2.Marginals(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "malformed",
    [
        block(first_depth=2),
        block(width=3),
        block(width=-1),
        block(width=100),
        block(token_ids=b"abc"),
        block(log_probs=np.array([-1], "<f4").tobytes()),
        block(log_probs=np.array([-1, np.nan], "<f4").tobytes()),
        block(log_probs=np.array([-1, 5], "<f4").tobytes()),
        block(token_ids=np.array([1, 1], "<i4").tobytes()),
        block(token_ids=np.array([1, -1], "<i4").tobytes()),
        block(token_ids=np.array([1, 5000], "<i4").tobytes()),
        block(width=0),
    ],
)
def test_malformed_marginals_are_refused(malformed: tree_pb2.Marginals) -> None:
    """Shapes, depths, NaN, positive log-probs, repeated and unknown tokens."""
    with pytest.raises(InvalidRequest):
        wire.marginals_from_messages([malformed], max_depths=4, max_width=8, vocabulary_size=1000)


PREFIXES = ((1,), (2,), (1, 2))
CONDITIONAL = Marginals(
    np.array([[1, 2], [3, 4], [5, 6], [1, 6], [2, 7]], np.int32), -np.arange(1, 11, dtype=np.float32).reshape(5, 2), PREFIXES
)


def received(blocks: list[tree_pb2.Marginals], max_prefixes: int = 3, max_depths: int = 4) -> Marginals:
    """What a caller makes of these blocks."""
    return wire.marginals_from_messages(
        blocks, max_depths=max_depths, max_width=8, vocabulary_size=1000, max_prefixes=max_prefixes
    )


@pytest.mark.parametrize("split", [False, True])
def test_conditional_marginals_survive_the_crossing(split: bool) -> None:
    """Rows by depth, then rows by path, in one block or in one for each path: the same proposal."""
    by_depth, by_path = (
        tree_pb2.Marginals.FromString(each.SerializeToString()) for each in wire.marginals_to_messages(CONDITIONAL)
    )
    assert (by_depth.last, by_path.last) == (False, True)
    blocks = [by_path]
    if split:
        blocks = [
            block(
                token_ids=by_path.token_ids[8 * row : 8 * row + 8],
                log_probs=by_path.log_probs[8 * row : 8 * row + 8],
                prefixes=[tree_pb2.Prefix(token_ids=prefix)],
            )
            for row, prefix in enumerate(PREFIXES)
        ]
    crossed = received([by_depth, *blocks])
    assert crossed.prefixes == PREFIXES
    np.testing.assert_array_equal(crossed.token_ids, CONDITIONAL.token_ids)
    np.testing.assert_array_equal(crossed.log_probs, CONDITIONAL.log_probs)


def conditional_block(*prefixes: tuple[int, ...], **changes: object) -> tree_pb2.Marginals:
    """The sound block as one of these paths, changed."""
    return block(prefixes=[tree_pb2.Prefix(token_ids=prefix) for prefix in prefixes], **changes)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ([block(), conditional_block((1,), (2,))], "1 rows for 2 prefixes"),
        ([block(), *[conditional_block((number,)) for number in range(4)]], "rows for 4 prefixes, at most 3"),
        ([block(), conditional_block((1, 2, 3, 4))], "a prefix of 4 tokens has children at depth 5, at most 4"),
        ([block(), conditional_block((1000,))], "a prefix has token 1000, the vocabulary has ids from 0 to 999"),
        ([block(), conditional_block((-1,))], "token ids start at 0, a prefix has a lower one"),
        ([block(), conditional_block(())], "a prefix has at least one token"),
        ([block(), conditional_block((1,)), conditional_block((1,))], "two rows for one prefix"),
        ([conditional_block((1,))], "leave none for the root's children"),
        ([conditional_block((1,)), block()], "a block by depth follows a conditional one"),
        ([block(), conditional_block((1,), width=1, token_ids=bytes(4), log_probs=bytes(4))], "differ in width"),
        ([block(), conditional_block((1,), token_ids=np.array([1, 1], "<i4").tobytes())], "a token twice in one row"),
        ([block(), conditional_block((1,), token_ids=np.array([1, 5000], "<i4").tobytes())], "token 5000"),
    ],
)
def test_malformed_conditional_marginals_are_refused(blocks: list[tree_pb2.Marginals], complaint: str) -> None:
    """Paths that cannot be, too many of them, and rows that are not theirs."""
    with pytest.raises(InvalidRequest, match=complaint):
        received(blocks)


def test_conditional_marginals_that_were_not_asked_for_are_refused() -> None:
    """A caller that takes none says so by taking none."""
    with pytest.raises(InvalidRequest, match="rows for 3 prefixes, at most 0"):
        received(wire.marginals_to_messages(CONDITIONAL), max_prefixes=0)


@pytest.mark.parametrize("data_type", [tree_pb2.DATA_TYPE_FLOAT32, tree_pb2.DATA_TYPE_FLOAT16, tree_pb2.DATA_TYPE_BFLOAT16])
def test_tensors_of_every_type_are_read(data_type: tree_pb2.DataType) -> None:
    """Halves and quarters are exact in all three types."""
    values = np.array([[0.5, -1.25, 3.0], [0.0, 2.0, -0.75]], np.float32)
    data = {
        tree_pb2.DATA_TYPE_FLOAT32: values.astype("<f4").tobytes(),
        tree_pb2.DATA_TYPE_FLOAT16: values.astype("<f2").tobytes(),
        tree_pb2.DATA_TYPE_BFLOAT16: (values.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }[data_type]
    message = tree_pb2.Tensor(data_type=data_type, shape=[2, 3], data=data)
    assert (wire.tensor_from_message(message, field="features") == values).all()


@pytest.mark.parametrize("shape", [[2, 2], [-1, -6], [6, 1, 2]])
def test_tensor_of_another_shape_is_refused(shape: list[int]) -> None:
    """Shape and elements must agree."""
    message = tree_pb2.Tensor(data_type=tree_pb2.DATA_TYPE_FLOAT32, shape=shape, data=bytes(24))
    with pytest.raises(InvalidRequest, match="features has shape"):
        wire.tensor_from_message(message, field="features")


def test_28_fingerprints_that_differ_are_refused_with_both_values() -> None:
    """Only fields that both sides set are compared."""
    ours = tree_pb2.Fingerprint(model="small", vocabulary_size=100, tokenizer_hash="aa")
    wire.check_fit(ours, tree_pb2.Fingerprint())
    wire.check_fit(ours, tree_pb2.Fingerprint(vocabulary_size=100))
    with pytest.raises(Incompatible, match="vocabulary_size: 100 for small, 200 for large"):
        wire.check_fit(ours, tree_pb2.Fingerprint(model="large", vocabulary_size=200))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 tokens, from 1 to 4"),
        (b"abc", "3 bytes, not a multiple of 4"),
        (bytes(4 * 5), "5 tokens, from 1 to 4"),
        (np.array([-1], "<i4").tobytes(), "token -1"),
        (np.array([10], "<i4").tobytes(), "token 10, the vocabulary has ids from 0 to 9"),
    ],
)
def test_27_token_ids_are_checked(data: bytes, message: str) -> None:
    """Empty, broken, too long, outside of the vocabulary."""
    with pytest.raises(InvalidRequest, match=message):
        wire.token_ids_from_bytes(data, field="prompt", max_length=4, vocabulary_size=10)
