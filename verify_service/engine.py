"""This file is the seam between the verify service and a target model: what an engine is given, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree, TokenLogProbs

SessionId = int


class Unsupported(ValueError):
    """Something that this engine cannot do: a sampling parameter, a kind of model. The message names it."""


class EngineLost(RuntimeError):
    """The engine can never step again: a process or a device that it needs is gone. The message says which."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank of a target holds: bytes of weights, and of keys and values when every slot is used."""

    rank: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Target:
    """What a target is and what it takes. Lengths in tokens; `max_tree_nodes` counts the root.

    `feature_size` is 0 if it gives no context features; else they are made of the outputs of `tapped_layers`, by the projection
    of that hash. `ranks` is what each of several ranks holds, empty if the engine does not say.
    """

    engine: str
    model: str
    vocabulary_size: int
    tokenizer_hash: str
    max_tree_nodes: int
    max_context: int
    end_token_ids: tuple[int, ...]
    feature_size: int = 0
    tapped_layers: tuple[int, ...] = ()
    feature_projection_hash: str = ""
    ranks: tuple[RankMemory, ...] = ()


class Masks(Protocol):
    """Which tokens the target may choose. They may still be computed when a step begins, beside its forward."""

    def rows(self) -> NDArray[np.int32]:
        """For each choice of a chunk or tree the tokens that it may be, int32 [choices, ceil(vocabulary / 32)]; waits.

        Bit v % 32 of word v // 32 is token v's. Every row allows a token.
        """


@dataclass(frozen=True)
class PrefillChunk:
    """The next tokens of a session's prompt, in order. `last` marks the chunk after which the target chooses a token.

    Without `masks` it may be any.
    """

    session: SessionId
    token_ids: tuple[int, ...]
    last: bool
    masks: Masks | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Scoring:
    """One tree to score for a session whose prefill is complete. The root is the session's last committed token.

    Without `masks` the target may choose any token.
    """

    session: SessionId
    tree: DraftTree
    masks: Masks | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class NodeProbabilities:
    """Likeliest tokens after one node with log-probabilities under the processed distribution, likeliest first."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class Distributions(Protocol):
    """What the target held likely after each node of one posterior. Valid until the engine's next step."""

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node, from which its choice is a sample; float64 [vocabulary]."""

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the `num_top` likeliest; before any processing."""


@dataclass(frozen=True)
class Posterior:
    """The target's choice after each node: of a tree all nodes, of a last chunk its last token, of another chunk none.

    `distributions` are those that the choices were made from, in the order of the choices; only with choices.
    `features`, float32 [nodes or chunk tokens, feature size], only if the engine taps them and the session wants them.
    """

    token_ids: tuple[int, ...]
    node_probabilities: tuple[NodeProbabilities, ...] = ()
    features: NDArray[np.float32] | None = None
    distributions: Distributions | None = field(default=None, compare=False, repr=False)


class TargetEngine(Protocol):
    """A target model on one device group. One thread calls, one call at a time; batches in and out."""

    @property
    def target(self) -> Target:
        """What this engine serves."""

    def open(
        self,
        session: SessionId,
        prompt: Sequence[int],
        sampling: Sampling,
        num_output_tokens: int = 0,
        num_node_probabilities: int = 0,
        wants_features: bool = False,
        first_feature_position: int = 0,
    ) -> int:
        """Make room for a session. The last `num_output_tokens` of the prompt count as output. Computes nothing yet.

        Returns how many of the prompt's first tokens need not be computed, another session having done so: the session's
        chunks start behind them. The prompt's last token is never among them. `wants_features` only where the target gives
        them: it is then 0, since features are made of what is computed, unless only those from `first_feature_position` on are
        wanted and that is at or behind the last token.
        """

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Run chunks and trees of any sessions through the target in one forward; one posterior each, in order."""

    def keep(self, session: SessionId, acceptance: Acceptance) -> None:
        """Of the session's last tree keep the accepted nodes' state; the rest is gone. Computes nothing."""

    def release(self, session: SessionId) -> None:
        """Free everything the session holds. An unknown session is no error."""


@runtime_checkable
class HasGraphs(Protocol):
    """An engine that captures steps as graphs, and counts those that run outside them."""

    @property
    def num_missed_graphs(self) -> int:
        """How many did."""
