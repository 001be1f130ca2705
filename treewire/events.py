"""This file is the events of a stream, as the client gives them: started once, chunks and rounds, finished once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from treewire.errors import InternalError
from treewire.types import Statistics, TokenLogProbs
from treewire.v1 import generate_pb2

_FINISH_REASON_PREFIX = "FINISH_REASON_"


@dataclass(frozen=True)
class Started:
    """The generation was admitted. `seed` is the one in use: the same seed gives the same tokens again."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True)
class Chunk:
    """New text and the tokens behind it. The text may be empty while a character, or a stop string, is incomplete.

    `log_probs` has one entry a token, if they were asked for; `index` tells the generations of one request apart.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class Round:
    """One round: the tree that was verified, root first, and what was committed of it.

    `token_ids`, `parents` (-1 for the root) and `scores` (cumulative log-probability under the drafter) have one entry
    a node; `accepted_nodes` are indices of nodes; `committed_token_ids` end with the bonus token; `length` is that of the
    committed sequence, prompt included. `node_texts` and `bonus_text` are the tokens for people to read: bytes that are no
    whole character are written as \\xNN.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accepted_nodes: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    length: int
    stage_seconds: Mapping[str, float]
    node_texts: tuple[str, ...]
    bonus_text: str
    index: int = 0


@dataclass(frozen=True)
class Finished:
    """The end. `finish_reason` is "stop" or "length"; `stop` is the stop string that was met, if one was."""

    finish_reason: str
    prompt_tokens: int
    statistics: Statistics
    stop: str | None
    index: int = 0


Event: TypeAlias = Started | Chunk | Round | Finished


def event_from_message(message: generate_pb2.GenerateResponse) -> Event:
    """The event of a message; InternalError for a kind that this client does not know."""
    match message.WhichOneof("event"):
        case "started":
            return _started(message.started)
        case "chunk":
            return _chunk(message.chunk)
        case "round":
            return _round(message.round)
        case "finished":
            return _finished(message.finished)
        case _:
            raise InternalError("the gateway sent an event that this client does not know; is the client older?")


def _started(message: generate_pb2.Started) -> Started:
    return Started(message.request_id, message.model, message.num_prompt_tokens, message.seed)


def _chunk(message: generate_pb2.Chunk) -> Chunk:
    log_probs = tuple(TokenLogProbs.from_message(entry) for entry in message.log_probs)
    return Chunk(message.text, tuple(message.token_ids), log_probs, message.index)


def _round(message: generate_pb2.Round) -> Round:
    return Round(
        token_ids=tuple(message.tree.token_ids),
        parents=tuple(message.tree.parents),
        scores=tuple(message.scores),
        accepted_nodes=tuple(message.accepted_nodes),
        committed_token_ids=tuple(message.commit.token_ids),
        length=message.commit.length,
        stage_seconds=dict(message.stage_seconds),
        node_texts=tuple(message.node_texts),
        bonus_text=message.bonus_text,
        index=message.index,
    )


def _finished(message: generate_pb2.Finished) -> Finished:
    return Finished(
        finish_reason=generate_pb2.FinishReason.Name(message.finish_reason).removeprefix(_FINISH_REASON_PREFIX).lower(),
        prompt_tokens=message.num_prompt_tokens,
        statistics=Statistics.from_message(message.statistics, output_tokens=message.num_output_tokens),
        stop=message.stop if message.HasField("stop") else None,
        index=message.index,
    )
