"""This file is one session of the draft service: what was committed, and what may be asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draft_service.engine import Drafter, Proposal, SessionId
from treewire import wire
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit
from treewire.errors import Incompatible, InvalidRequest
from treewire.v1 import draft_pb2, tree_pb2

_session_ids = itertools.count(1)


@dataclass(frozen=True)
class Opening:
    """A checked request to open a session."""

    prompt: tuple[int, ...]
    sampling: Sampling
    horizon: int
    width: int
    takes_conditional: bool

    @classmethod
    def from_message(cls, message: draft_pb2.DraftOpen, drafter: Drafter) -> Opening:
        """Checks every field against what the drafter takes; horizon and width are cut to its own."""
        wire.check_protocol_version(message.protocol_version)
        wire.check_fit(fingerprint(drafter), message.target)
        _check_features(drafter, message.target)
        for name, value in (("horizon", message.horizon), ("width", message.width)):
            if value < 1:
                raise InvalidRequest(f"{name} is {value}, at least 1 is taken", metadata={"field": name, "value": str(value)})
        vocabulary_size = drafter.vocabulary_size or message.target.vocabulary_size
        if vocabulary_size < 1:
            raise InvalidRequest("target.vocabulary_size is 0, this drafter needs it", metadata={"field": "target"})
        prompt = wire.token_ids_from_bytes(
            message.prompt_token_ids,
            field="prompt_token_ids",
            max_length=drafter.max_context,
            vocabulary_size=vocabulary_size,
        )
        return cls(
            prompt=prompt,
            sampling=wire.sampling_from_message(
                message.sampling,
                Sampling(shares_noise=message.rank_with_noise or not message.HasField("rank_with_noise")),
                vocabulary_size=vocabulary_size,
            ),
            horizon=min(message.horizon, drafter.horizon),
            width=min(message.width, drafter.width, vocabulary_size),
            takes_conditional=message.takes_conditional,
        )


def _check_features(drafter: Drafter, target: tree_pb2.Fingerprint) -> None:
    """Incompatible if the drafter reads features and the target gives none."""
    if drafter.needs_features and not target.feature_size:
        raise Incompatible(
            f"feature_size: {drafter.feature_size} from layers {list(drafter.tapped_layers)} for {drafter.model}, none for "
            f"{target.model or 'the target'}: its service was started without this drafter's feature projection",
            metadata={"field": "feature_size", "ours": str(drafter.feature_size), "theirs": "0"},
        )


def fingerprint(drafter: Drafter) -> tree_pb2.Fingerprint:
    """The drafter's side of the handshake; empty fields fit any target."""
    return tree_pb2.Fingerprint(
        model=drafter.model,
        vocabulary_size=drafter.vocabulary_size,
        tokenizer_hash=drafter.tokenizer_hash,
        feature_size=drafter.feature_size,
        tapped_layers=drafter.tapped_layers,
        feature_projection_hash=drafter.feature_projection_hash,
    )


@dataclass
class DraftSession:
    """The state of one stream. `length` counts committed tokens, `num_features` the positions whose features have arrived.

    `waiting` are features that go to the engine with the next proposal.
    """

    drafter: Drafter
    opening: Opening
    vocabulary_size: int
    id: SessionId = field(default_factory=lambda: next(_session_ids))
    length: int = field(init=False)
    num_features: int = 0
    waiting: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = len(self.opening.prompt)

    def proposal_from_message(self, message: tree_pb2.Commit) -> Proposal:
        """The next commit, checked against the sequence and the drafter's longest context."""
        commit: Commit = wire.commit_from_message(message, previous_length=self.length, vocabulary_size=self.vocabulary_size)
        if commit.length > self.drafter.max_context:
            raise InvalidRequest(
                f"the sequence has {commit.length} tokens, this drafter follows {self.drafter.max_context}",
                metadata={"field": "commit", "value": str(commit.length), "limit": str(self.drafter.max_context)},
            )
        if self.drafter.needs_features and self.num_features != commit.length - 1:
            raise Incompatible(
                f"commit ends at length {commit.length}, which needs the features of {commit.length - 1} positions; those of "
                f"{self.num_features} have come"
            )
        self.length = commit.length
        horizon = min(self.opening.horizon, self.drafter.max_context - commit.length)
        features = self.take_waiting() if self.waiting else None
        return Proposal(self.id, commit, horizon, self.opening.width, features, self.opening.takes_conditional)

    def features_from_message(self, message: tree_pb2.Features) -> NDArray[np.float32]:
        """The next positions' features, checked against what has come before and the longest context."""
        features = wire.features_from_message(message, first_position=self.num_features, feature_size=self.drafter.feature_size)
        if self.num_features + len(features) > self.drafter.max_context:
            raise InvalidRequest(
                f"features reach position {self.num_features + len(features) - 1}, this drafter follows "
                f"{self.drafter.max_context} tokens",
                metadata={"field": "features", "limit": str(self.drafter.max_context)},
            )
        self.num_features += len(features)
        return features

    def take_waiting(self) -> NDArray[np.float32]:
        """The features that wait, in one array; none wait afterwards. There is at least one."""
        waiting, self.waiting = self.waiting, []
        return np.concatenate(waiting)
