"""This file is one session of the verify service: what was committed, what may come next, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treewire import wire
from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.structure import Structure
from treewire.core.tree import Commit, DraftTree, TokenLogProbs
from treewire.errors import Incompatible, InvalidRequest, Unsupported
from treewire.v1 import tree_pb2, verify_pb2
from verify_service.engine import SessionId, Target
from verify_service.rules import Rule, hybrid, shared_noise
from verify_service.structures.grammars import Matching
from verify_service.structures.pruning import Pruning

MAX_NODE_PROBABILITIES = 64
MAX_LOG_PROBS = 64
PRICES_SECONDS = 3.0
_session_ids = itertools.count(1)


@dataclass(frozen=True)
class Opening:
    """A checked request to open a session."""

    prompt: tuple[int, ...]
    sampling: Sampling
    num_output_tokens: int
    num_node_probabilities: int
    num_log_probs: int | None
    accept: int
    wants_features: bool
    first_feature_position: int
    structure: Structure | None

    @property
    def output(self) -> tuple[int, ...]:
        """What of the prompt was generated before."""
        return self.prompt[len(self.prompt) - self.num_output_tokens :]

    @property
    def caller_accepts(self) -> bool:
        """True if this service only scores."""
        return self.accept == tree_pb2.ACCEPTANCE_CALLER

    @property
    def is_hybrid(self) -> bool:
        """True if trees may have drawn nodes."""
        return self.accept == tree_pb2.ACCEPTANCE_HYBRID

    @classmethod
    def from_message(cls, message: verify_pb2.VerifyOpen, target: Target) -> Opening:
        """Checks every field against what the target takes."""
        wire.check_protocol_version(message.protocol_version)
        wire.check_fit(fingerprint(target), message.target)
        _refuse_unsupported(message, target)
        prompt = wire.token_ids_from_bytes(
            message.prompt_token_ids,
            field="prompt_token_ids",
            max_length=target.max_context,
            vocabulary_size=target.vocabulary_size,
        )
        _check_range("num_output_tokens", message.num_output_tokens, len(prompt) - 1)
        _check_range("num_node_probabilities", message.num_node_probabilities, MAX_NODE_PROBABILITIES)
        _check_range("num_log_probs", message.num_log_probs, MAX_LOG_PROBS)
        _check_range("first_feature_position", message.first_feature_position, len(prompt))
        return cls(
            prompt=prompt,
            sampling=wire.sampling_from_message(message.sampling, Sampling(), vocabulary_size=target.vocabulary_size),
            num_output_tokens=message.num_output_tokens,
            num_node_probabilities=message.num_node_probabilities,
            num_log_probs=message.num_log_probs if message.HasField("num_log_probs") else None,
            accept=message.accept,
            wants_features=message.features,
            first_feature_position=message.first_feature_position,
            structure=wire.structure_from_message(message),
        )


def _refuse_unsupported(message: verify_pb2.VerifyOpen, target: Target) -> None:
    if message.accept not in tree_pb2.Acceptance.values():
        raise InvalidRequest(
            f"accept is {message.accept}, known are {tree_pb2.Acceptance.keys()}", metadata={"field": "accept"}
        )
    if message.features and not target.feature_size:
        raise Unsupported(
            "features: this target gives no context features, its service was started without a feature projection",
            metadata={"field": "features"},
        )
    if message.accept == tree_pb2.ACCEPTANCE_CALLER and message.HasField("num_log_probs"):
        raise Unsupported(
            "num_log_probs: a caller that accepts takes num_node_probabilities instead", metadata={"field": "num_log_probs"}
        )

    if message.WhichOneof("structure") and message.sampling.min_tokens:
        raise Unsupported(
            "min_tokens: what must match a structure ends where that ends", metadata={"field": "sampling.min_tokens"}
        )


def _check_range(field_name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise InvalidRequest(
            f"{field_name} is {value}, from 0 to {limit} is taken",
            metadata={"field": field_name, "value": str(value), "limit": str(limit)},
        )


def fingerprint(target: Target) -> tree_pb2.Fingerprint:
    """The target's side of the handshake."""
    return tree_pb2.Fingerprint(
        model=target.model,
        vocabulary_size=target.vocabulary_size,
        tokenizer_hash=target.tokenizer_hash,
        feature_size=target.feature_size,
        tapped_layers=target.tapped_layers,
        feature_projection_hash=target.feature_projection_hash,
    )


@dataclass
class VerifySession:
    """The state of one stream. `length` counts committed tokens; the last of them is the next tree's root.

    `pruning_to_keep` is what a structure leaves of `tree_to_keep`; `features_to_keep` are those of its nodes, if the session
    wants features. `num_features` counts the positions whose features have been sent, or need not be. `prices_told` is when
    prices were.
    """

    target: Target
    opening: Opening
    id: SessionId = field(default_factory=lambda: next(_session_ids))
    length: int = field(init=False)
    root_token_id: int | None = None
    matching: Matching | None = None
    tree_to_keep: DraftTree | None = None
    pruning_to_keep: Pruning | None = None
    features_to_keep: NDArray[np.float32] | None = None
    num_features: int = 0
    prices_told: float | None = None

    def __post_init__(self) -> None:
        self.length = len(self.opening.prompt)

    def tree_from_message(self, message: tree_pb2.DraftTree) -> DraftTree:
        """The next tree, checked against what was committed and against the longest context."""
        if self.tree_to_keep is not None:
            raise Incompatible(f"a tree of {len(self.tree_to_keep)} nodes waits for its keep, send keep before the next tree")
        tree = wire.tree_from_message(
            message, max_nodes=self.target.max_tree_nodes, vocabulary_size=self.target.vocabulary_size
        )
        if self.root_token_id is not None and tree.token_ids[0] != self.root_token_id:
            raise Incompatible(f"tree has root {tree.token_ids[0]}, the last committed token is {self.root_token_id}")
        if tree.draws and not self.opening.is_hybrid:
            raise InvalidRequest(
                f"tree has {len(tree.draws)} drawn nodes, only sessions opened with ACCEPTANCE_HYBRID take them",
                metadata={"field": "tree.draws"},
            )
        deepest = self.length - 1 + max(tree.depths)
        if deepest >= self.target.max_context:
            raise InvalidRequest(
                f"tree reaches position {deepest}, this target's last is {self.target.max_context - 1}",
                metadata={"field": "tree", "value": str(deepest), "limit": str(self.target.max_context - 1)},
            )
        return tree

    def acceptance_from_message(self, message: verify_pb2.Keep) -> tuple[DraftTree, Acceptance]:
        """The caller's acceptance of the tree that waits for it: a path from the root that the structure allows."""
        if self.tree_to_keep is None:
            raise Incompatible("keep without a scored tree, or in a session whose service accepts")
        tree, nodes = self.tree_to_keep, tuple(message.nodes)
        if not nodes or max(nodes) >= len(tree) or min(nodes) < 0 or tree.path(nodes[-1]) != nodes:
            raise InvalidRequest(f"keep names nodes {list(nodes)}, which is no path from the root of the last tree")
        if not 0 <= message.next_token_id < self.target.vocabulary_size:
            raise InvalidRequest(
                f"keep has next token {message.next_token_id}, the vocabulary has ids to {self.target.vocabulary_size - 1}"
            )
        return tree, Acceptance(nodes, message.next_token_id)

    def prices_are_old(self, now: float) -> bool:
        """True once every few seconds, when the caller is to be told the prices again. It was told them at open."""
        if self.prices_told is None:
            self.prices_told = now
        if now - self.prices_told < PRICES_SECONDS:
            return False
        self.prices_told = now
        return True

    def kept(self, acceptance: Acceptance) -> Acceptance:
        """The caller's acceptance as one of the nodes that the target computed. InvalidRequest if it has others."""
        try:
            return acceptance if self.pruning_to_keep is None else self.pruning_to_keep.within(acceptance)
        except ValueError as error:
            raise InvalidRequest(f"keep: {error}", metadata={"field": "keep.nodes"}) from error

    def features_to_messages(self, features: NDArray[np.float32], *, last: bool) -> list[tree_pb2.Features]:
        """Messages of the next positions' features, float32 [positions, size]."""
        messages = wire.features_to_messages(features, self.num_features, last=last)
        self.num_features += len(features)
        return messages

    @property
    def rule(self) -> Rule | None:
        """How the next tree is accepted; None if the caller does."""
        if self.opening.caller_accepts:
            return None
        if self.opening.is_hybrid:
            return hybrid(self.opening.sampling.seed, self.length - 1)
        return shared_noise

    def commit(self, token_ids: tuple[int, ...], log_probs: tuple[TokenLogProbs, ...] = ()) -> Commit:
        """Append accepted tokens and the bonus to the sequence."""
        self.length += len(token_ids)
        self.root_token_id = token_ids[-1]
        self.tree_to_keep = self.pruning_to_keep = self.features_to_keep = None
        return Commit(token_ids, self.length, log_probs)
