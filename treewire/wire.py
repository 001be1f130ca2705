"""This file is the one crossing between messages and core types. What arrives is checked here; what is wrong is
InvalidRequest or Incompatible with the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import BranchWeights
from treewire.core.sampling import Sampling
from treewire.core.structure import Structure
from treewire.core.tree import Commit, DraftTree, Draw, Marginals, TokenLogProbs
from treewire.errors import Incompatible, InvalidRequest
from treewire.v1 import draft_pb2, generate_pb2, tree_pb2, verify_pb2

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_FEATURE_BYTES = 2**20 - 2**10  # of one message: below 1 MiB with all that is around them
MAX_DRAW_TOKENS = 1024
MAX_PREFIXES = 1024  # of one proposal's conditional rows
_TOKEN_DTYPE = np.dtype("<i4")
_LOG_PROB_DTYPE = np.dtype("<f4")
_TENSOR_DTYPES: dict[int, np.dtype[np.floating]] = {
    tree_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tree_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
}

_Value = TypeVar("_Value")


def _checked(field: str, construct: Callable[[], _Value]) -> _Value:
    """What `construct` makes; its ValueError is the sender's fault."""
    try:
        return construct()
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", metadata={"field": field}) from error


def token_ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian."""
    return np.asarray(token_ids, _TOKEN_DTYPE).tobytes()


def token_ids_from_bytes(data: bytes, *, field: str, max_length: int, vocabulary_size: int) -> tuple[int, ...]:
    """Token ids from int32 little-endian: at least one, at most `max_length`, each below `vocabulary_size`."""
    if len(data) % _TOKEN_DTYPE.itemsize:
        raise InvalidRequest(f"{field} has {len(data)} bytes, not a multiple of 4", metadata={"field": field})
    token_ids = np.frombuffer(data, _TOKEN_DTYPE)
    if not 1 <= len(token_ids) <= max_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens, from 1 to {max_length} are taken",
            metadata={"field": field, "value": str(len(token_ids)), "limit": str(max_length)},
        )
    if token_ids.min() < 0 or token_ids.max() >= vocabulary_size:
        worst = int(token_ids.min() if token_ids.min() < 0 else token_ids.max())
        raise InvalidRequest(
            f"{field} has token {worst}, the vocabulary has ids from 0 to {vocabulary_size - 1}",
            metadata={"field": field, "value": str(worst), "limit": str(vocabulary_size - 1)},
        )
    return tuple(token_ids.tolist())


def tree_to_message(tree: DraftTree) -> tree_pb2.DraftTree:
    """The message of a tree."""
    draws = [
        tree_pb2.Draw(
            node=draw.node,
            token_ids=token_ids_to_bytes(draw.token_ids),
            log_probs=np.asarray(draw.log_probs, _LOG_PROB_DTYPE).tobytes(),
        )
        for draw in tree.draws
    ]
    return tree_pb2.DraftTree(token_ids=tree.token_ids, parents=tree.parents, draws=draws)


def tree_from_message(message: tree_pb2.DraftTree, *, max_nodes: int, vocabulary_size: int) -> DraftTree:
    """The tree of a message, of at most `max_nodes` nodes, root included."""
    if len(message.token_ids) > max_nodes:
        raise InvalidRequest(
            f"tree has {len(message.token_ids):,} nodes, this target takes {max_nodes:,}",
            metadata={"field": "tree", "value": str(len(message.token_ids)), "limit": str(max_nodes)},
        )
    draws = tuple(_draw(draw, vocabulary_size) for draw in message.draws)
    tree = _checked("tree", lambda: DraftTree(tuple(message.token_ids), tuple(message.parents), draws))
    if max(tree.token_ids) >= vocabulary_size:
        raise InvalidRequest(
            f"tree has token {max(tree.token_ids)}, the vocabulary has ids from 0 to {vocabulary_size - 1}",
            metadata={"field": "tree", "value": str(max(tree.token_ids)), "limit": str(vocabulary_size - 1)},
        )
    return tree


def _draw(message: tree_pb2.Draw, vocabulary_size: int) -> Draw:
    token_ids = token_ids_from_bytes(
        message.token_ids, field="tree.draws", max_length=MAX_DRAW_TOKENS, vocabulary_size=vocabulary_size
    )
    log_probs = _checked("tree.draws", lambda: np.frombuffer(message.log_probs, _LOG_PROB_DTYPE))
    return _checked("tree.draws", lambda: Draw(message.node, token_ids, tuple(log_probs.tolist())))


def log_probs_to_messages(log_probs: Sequence[TokenLogProbs]) -> list[tree_pb2.TokenLogProbs]:
    """The messages of tokens' log-probs."""
    return [
        tree_pb2.TokenLogProbs(log_prob=entry.log_prob, top_token_ids=entry.top_token_ids, top_log_probs=entry.top_log_probs)
        for entry in log_probs
    ]


def _log_probs_from_messages(messages: Iterable[tree_pb2.TokenLogProbs]) -> tuple[TokenLogProbs, ...]:
    return tuple(
        TokenLogProbs(message.log_prob, tuple(message.top_token_ids), tuple(message.top_log_probs)) for message in messages
    )


def commit_to_message(commit: Commit) -> tree_pb2.Commit:
    """The message of a commit."""
    return tree_pb2.Commit(token_ids=commit.token_ids, length=commit.length, log_probs=log_probs_to_messages(commit.log_probs))


def commit_from_message(message: tree_pb2.Commit, *, previous_length: int, vocabulary_size: int) -> Commit:
    """The commit of a message that follows a sequence of `previous_length` tokens; Incompatible if it does not follow."""
    log_probs = _log_probs_from_messages(message.log_probs)
    commit = _checked("commit", lambda: Commit(tuple(message.token_ids), message.length, log_probs))
    if max(commit.token_ids) >= vocabulary_size:
        raise InvalidRequest(
            f"commit has token {max(commit.token_ids)}, the vocabulary has ids from 0 to {vocabulary_size - 1}",
            metadata={"field": "commit", "value": str(max(commit.token_ids)), "limit": str(vocabulary_size - 1)},
        )
    if commit.length != previous_length + len(commit.token_ids):
        raise Incompatible(
            f"commit ends at length {commit.length}, but {len(commit.token_ids)} tokens after {previous_length} "
            f"end at {previous_length + len(commit.token_ids)}"
        )
    return commit


def marginals_to_messages(marginals: Marginals) -> list[tree_pb2.Marginals]:
    """The blocks that make the whole proposal: all depths, then all prefixes if it is conditional."""
    by_depth = _rows_to_message(marginals, slice(0, marginals.num_depths), first_depth=1)
    if not marginals.prefixes:
        by_depth.last = True
        return [by_depth]
    by_path = _rows_to_message(marginals, slice(marginals.num_depths, None), last=True)
    by_path.prefixes.extend(tree_pb2.Prefix(token_ids=prefix) for prefix in marginals.prefixes)
    return [by_depth, by_path]


def _rows_to_message(marginals: Marginals, rows: slice, *, first_depth: int = 0, last: bool = False) -> tree_pb2.Marginals:
    return tree_pb2.Marginals(
        first_depth=first_depth,
        width=marginals.width,
        token_ids=marginals.token_ids[rows].astype(_TOKEN_DTYPE, copy=False).tobytes(),
        log_probs=marginals.log_probs[rows].astype(_LOG_PROB_DTYPE, copy=False).tobytes(),
        last=last,
    )


def marginals_from_messages(
    messages: Sequence[tree_pb2.Marginals],
    *,
    max_depths: int,
    max_width: int,
    vocabulary_size: int,
    max_prefixes: int = 0,
) -> Marginals:
    """The proposal of its blocks, all of one width: consecutive depths from 1, then rows of up to `max_prefixes` prefixes."""
    by_path = [message for message in messages if message.prefixes]
    by_depth = list(messages[: len(messages) - len(by_path)])
    if any(message.prefixes for message in by_depth):
        raise InvalidRequest("marginals: a block by depth follows a conditional one", metadata={"field": "prefixes"})
    prefixes = _prefixes(by_path, max_prefixes, max_depths, vocabulary_size)
    rows, depth = [], 1
    for message in by_depth:
        rows.append(_block(message, max_width))
        if message.first_depth != depth:
            raise InvalidRequest(f"marginals block starts at depth {message.first_depth}, {depth} is next")
        depth += len(rows[-1].token_ids)
    if depth - 1 > max_depths:
        raise InvalidRequest(f"marginals reach depth {depth - 1}, at most {max_depths} was asked for")
    for message in by_path:
        rows.append(_block(message, max_width))
        if len(rows[-1].token_ids) != len(message.prefixes):
            raise InvalidRequest(f"marginals block has {len(rows[-1].token_ids)} rows for {len(message.prefixes)} prefixes")
    rows = [row for row in rows if len(row.token_ids)]
    if not rows:
        return Marginals.empty()
    if len({row.token_ids.shape[1] for row in rows}) > 1:
        raise InvalidRequest("marginals: blocks of one proposal differ in width")
    token_ids = np.concatenate([row.token_ids for row in rows])
    log_probs = np.concatenate([row.log_probs for row in rows])
    if token_ids.max() >= vocabulary_size:
        raise InvalidRequest(f"marginals have token {token_ids.max()}, the vocabulary has ids from 0 to {vocabulary_size - 1}")
    return _checked("marginals", lambda: Marginals(token_ids, log_probs, prefixes))


def _prefixes(
    messages: Iterable[tree_pb2.Marginals], max_prefixes: int, max_depths: int, vocabulary_size: int
) -> tuple[tuple[int, ...], ...]:
    """The paths of conditional blocks, in the order of their rows; what they must be beside this, `Marginals` checks."""
    prefixes = [message for block in messages for message in block.prefixes]
    if len(prefixes) > max_prefixes:
        raise InvalidRequest(
            f"marginals have rows for {len(prefixes)} prefixes, at most {max_prefixes} were to come",
            metadata={"field": "prefixes", "value": str(len(prefixes)), "limit": str(max_prefixes)},
        )
    for prefix in prefixes:
        if len(prefix.token_ids) >= max_depths:
            raise InvalidRequest(
                f"a prefix of {len(prefix.token_ids)} tokens has children at depth {len(prefix.token_ids) + 1}, at most "
                f"{max_depths} was asked for",
                metadata={"field": "prefixes"},
            )
        if max(prefix.token_ids, default=0) >= vocabulary_size:
            raise InvalidRequest(
                f"a prefix has token {max(prefix.token_ids)}, the vocabulary has ids from 0 to {vocabulary_size - 1}",
                metadata={"field": "prefixes"},
            )
    return tuple(tuple(prefix.token_ids) for prefix in prefixes)


class _Rows(NamedTuple):
    """What a block says, int32 and float32 [rows, width]."""

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]


def _block(message: tree_pb2.Marginals, max_width: int) -> _Rows:
    if not 0 <= message.width <= max_width:
        raise InvalidRequest(f"marginals have width {message.width}, at most {max_width} was asked for")
    num_bytes = len(message.token_ids)
    fits = num_bytes % (_TOKEN_DTYPE.itemsize * message.width) == 0 if message.width else num_bytes == 0
    if not fits or len(message.log_probs) != num_bytes:
        raise InvalidRequest(
            f"marginals of width {message.width}: {num_bytes} token bytes and {len(message.log_probs)} log-prob bytes"
        )
    shape = (-1, message.width) if message.width else (0, 0)
    return _Rows(
        np.frombuffer(message.token_ids, _TOKEN_DTYPE).reshape(shape),
        np.frombuffer(message.log_probs, _LOG_PROB_DTYPE).reshape(shape),
    )


def sampling_to_message(sampling: Sampling) -> tree_pb2.Sampling:
    """The message of complete sampling parameters: every field is set."""
    return tree_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def sampling_from_message(message: tree_pb2.Sampling, defaults: Sampling, *, vocabulary_size: int | None = None) -> Sampling:
    """Sampling parameters of a message; what it does not set is taken from `defaults`.

    The tokens that it names are checked against the vocabulary, if that is known.
    """
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    if "logit_bias" in given:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(message.stop_token_ids)
    sampling = _checked("sampling", lambda: replace(defaults, **given))
    if vocabulary_size is not None:
        _checked("sampling", lambda: sampling.check_vocabulary(vocabulary_size))
    return sampling


def set_structure(message: verify_pb2.VerifyOpen, structure: Structure | None) -> None:
    """Say in a message what the output must match, if it must match anything."""
    if structure is not None:
        setattr(message, structure.kind, structure.text)


def structure_from_message(message: generate_pb2.GenerateRequest | verify_pb2.VerifyOpen) -> Structure | None:
    """What the output must match; None if it need not match anything."""
    kind = message.WhichOneof("structure")
    return None if kind is None else _checked(kind, lambda: Structure(kind, getattr(message, kind)))


def tensor_to_message(array: NDArray[np.float32]) -> tree_pb2.Tensor:
    """The message of a float32 array."""
    return tree_pb2.Tensor(
        data_type=tree_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=np.ascontiguousarray(array, "<f4").tobytes()
    )


def tensor_from_message(message: tree_pb2.Tensor, *, field: str) -> NDArray[np.float32]:
    """The array of a tensor, as float32."""
    if message.data_type == tree_pb2.DATA_TYPE_BFLOAT16:
        values = (np.frombuffer(message.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif message.data_type in _TENSOR_DTYPES:
        values = _checked(field, lambda: np.frombuffer(message.data, _TENSOR_DTYPES[message.data_type]))
    else:
        raise InvalidRequest(f"{field} has data type {message.data_type}, known are float32, float16 and bfloat16")
    if any(length < 0 for length in message.shape) or int(np.prod(message.shape, dtype=object)) != values.size:
        raise InvalidRequest(f"{field} has shape {list(message.shape)} but {values.size} elements")
    return values.astype(np.float32, copy=False).reshape(tuple(message.shape))


def features_to_messages(features: NDArray[np.float32], first_position: int, *, last: bool) -> list[tree_pb2.Features]:
    """Messages of the context features [positions, size] of consecutive positions, each below 1 MiB; at least one.

    `last` marks the last of them as the end of the prompt's features or the commit's.
    """
    rows = max(1, MAX_FEATURE_BYTES // (features.shape[1] * features.itemsize))
    starts = range(0, max(1, len(features)), rows)
    return [
        tree_pb2.Features(
            first_position=first_position + start,
            tensor=tensor_to_message(features[start : start + rows]),
            last=last and start == starts[-1],
        )
        for start in starts
    ]


def features_from_message(message: tree_pb2.Features, *, first_position: int, feature_size: int) -> NDArray[np.float32]:
    """The features [positions, size] of a message that follows those of `first_position` positions; Incompatible if it does
    not follow."""
    if message.first_position != first_position:
        raise Incompatible(f"features start at position {message.first_position}, {first_position} is next")
    features = tensor_from_message(message.tensor, field="features")
    if features.ndim != 2 or features.shape[1] != feature_size:
        raise InvalidRequest(
            f"features have shape {list(features.shape)}, [positions, {feature_size}] is taken", metadata={"field": "features"}
        )
    return features


def branch_weights_to_message(weights: BranchWeights | None) -> draft_pb2.BranchWeights | None:
    """The message of weights; None of none."""
    return None if weights is None else draft_pb2.BranchWeights(log_prob=weights.log_prob, noise=weights.noise)


def branch_weights_from_message(message: draft_pb2.DraftLimits) -> BranchWeights | None:
    """The weights that were fitted to a drafter, None if there are none; Incompatible if they cannot be."""
    if not message.HasField("branch_weights"):
        return None
    try:
        return BranchWeights(message.branch_weights.log_prob, message.branch_weights.noise)
    except ValueError as error:
        raise Incompatible(f"branch_weights: {error}", metadata={"field": "branch_weights"}) from error


def check_protocol_version(version: int) -> None:
    """Incompatible unless the peer speaks our version."""
    if version != PROTOCOL_VERSION:
        raise Incompatible(f"peer speaks protocol version {version}, this service speaks {PROTOCOL_VERSION}")


def check_fit(ours: tree_pb2.Fingerprint, theirs: tree_pb2.Fingerprint) -> None:
    """Incompatible if any field that both sides set differs; the message names the field and both values."""
    for field in ("vocabulary_size", "tokenizer_hash", "feature_size", "tapped_layers", "feature_projection_hash"):
        our_value, their_value = getattr(ours, field), getattr(theirs, field)
        if our_value and their_value and our_value != their_value:
            ours_shown = list(our_value) if field == "tapped_layers" else our_value
            theirs_shown = list(their_value) if field == "tapped_layers" else their_value
            raise Incompatible(
                f"{field}: {ours_shown} for {ours.model or 'this side'}, {theirs_shown} for {theirs.model or 'the other side'}",
                metadata={"field": field, "ours": str(ours_shown), "theirs": str(theirs_shown)},
            )
