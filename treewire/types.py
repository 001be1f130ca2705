"""This file is what a caller asks for and what comes back: Sampling, Request, Statistics, Generation, ModelInfo."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypedDict

from treewire.errors import InvalidRequest
from treewire.v1 import generate_pb2, tree_pb2


class Message(TypedDict):
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. None takes the server's default; the server checks the values and states the limits.

    Temperature 0 is greedy. The same `seed` gives the same tokens whatever the drafter, the tree and the load; without
    one the gateway draws it and tells it (`Generation.seed`).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int | None = None

    def to_message(self) -> tree_pb2.Sampling:
        """The message: only what is given is set. InvalidRequest for a value that its field cannot hold."""
        message = tree_pb2.Sampling()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _set(message, field.name, value)
        return message


def _set(message: tree_pb2.Sampling, name: str, value: float | Mapping[int, float]) -> None:
    try:
        if isinstance(value, Mapping):
            message.logit_bias.update(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{name} is {value!r}: {error}", metadata={"field": name}) from error


class Acceptance(Enum):
    """How drafts are accepted; all rules sample the target's own distribution.

    SHARED_NOISE, the default, gives the same tokens for the same seed whatever the drafter and the tree. HYBRID accepts by
    rejection sampling, with randomness that the drafter does not share: its tokens depend on the trees too.
    """

    SHARED_NOISE = "shared_noise"
    HYBRID = "hybrid"

    def to_message(self) -> tree_pb2.Acceptance.ValueType:
        """The value on the wire."""
        return tree_pb2.Acceptance.Value(f"ACCEPTANCE_{self.name}")


class Options(TypedDict, total=False):
    """The named parameters of `generate` and `stream`, as described at `Request`."""

    system: str | None
    messages: Sequence[Message] | None
    text: str | None
    token_ids: Sequence[int] | None
    sampling: Sampling | None
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_end: bool
    budget: int | None
    width: int | None
    include_rounds: bool
    accept: Acceptance | None
    hybrid_width: int | None
    num_log_probs: int | None
    n: int | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    deadline_seconds: float | None
    resume: bool


@dataclass(frozen=True)
class Request:
    """What to generate. Exactly one of four inputs, else InvalidRequest:

    - `prompt`: what a user says, answered in chat form; `system` may go before it;
    - `messages`: a whole conversation, oldest first;
    - `text`: text that is continued as it is, without a chat template;
    - `token_ids`: token ids to continue.

    The rest is optional. `sampling`, `max_tokens`, `budget` (nodes of each draft tree, root excluded; 0 turns drafting
    off) and `width` (tokens at each depth that trees choose from; 1 drafts chains) take the server's defaults. The
    generation ends before the first string of `stop`, at a token of `stop_token_ids` or at the model's own end unless
    `ignore_end`. `include_rounds` asks for one Round event a round.

    `accept` is the acceptance rule, `hybrid_width` the children of a node under HYBRID. With `num_log_probs` every token comes
    with its log-probability under the target's own distribution, and with so many of the likeliest tokens. `n` asks for
    independent generations of the same prompt with the seeds seed, seed + 1, ...; their events have an `index`.
    The whole output matches `json_schema` (as text, or as an object), `regex` or `grammar` (GBNF, from its rule root), of which
    one may be given; what is not finished within `max_tokens` is the beginning of such a text.
    `deadline_seconds` replaces the client's timeout for this call. With `resume` a generation whose gateway is lost goes on
    at the next one that answers, from the tokens delivered so far and with the same seed: the same tokens, none twice.
    """

    prompt: str | None = None
    system: str | None = None
    messages: Sequence[Message] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    sampling: Sampling | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_end: bool = False
    budget: int | None = None
    width: int | None = None
    include_rounds: bool = False
    accept: Acceptance | None = None
    hybrid_width: int | None = None
    num_log_probs: int | None = None
    n: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    deadline_seconds: float | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        inputs = {"prompt": self.prompt, "messages": self.messages, "text": self.text, "token_ids": self.token_ids}
        given = [name for name, value in inputs.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequest(f"exactly one of {', '.join(inputs)} is taken, given: {', '.join(given) or 'none'}")
        if self.system is not None and self.prompt is None:
            raise InvalidRequest(f"system goes with prompt, given: {given[0]}")
        if self.resume and (self.n or 1) > 1:
            raise InvalidRequest(f"n is {self.n}, 1 goes with resume", metadata={"field": "n"})
        structures = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        given = [name for name, value in structures.items() if value is not None]
        if len(given) > 1:
            raise InvalidRequest(f"one of {', '.join(structures)} is taken, given: {', '.join(given)}")
        if isinstance(self.stop, str):
            raise InvalidRequest(f"stop is the string {self.stop!r}, a sequence of strings is taken: [{self.stop!r}]")

    def to_message(self) -> generate_pb2.GenerateRequest:
        """The message. InvalidRequest for a value that its field cannot hold."""
        try:
            message = generate_pb2.GenerateRequest(
                chat=self._chat(),
                tokens=self._tokens(),
                sampling=self.sampling.to_message() if self.sampling is not None else None,
                max_tokens=self.max_tokens,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_end=self.ignore_end,
                budget=self.budget,
                width=self.width,
                include_rounds=self.include_rounds,
                accept=self.accept.to_message() if self.accept is not None else tree_pb2.ACCEPTANCE_UNSPECIFIED,
                hybrid_width=self.hybrid_width,
                num_log_probs=self.num_log_probs,
                n=self.n,
            )
            self._set_structure(message)
            if self.text is not None:
                message.text = self.text
        except (ValueError, TypeError, struct.error) as error:
            raise InvalidRequest(f"the request cannot be sent: {error}") from error
        return message

    def _set_structure(self, message: generate_pb2.GenerateRequest) -> None:
        if self.json_schema is not None:
            message.json_schema = self.json_schema if isinstance(self.json_schema, str) else json.dumps(self.json_schema)
        if self.regex is not None:
            message.regex = self.regex
        if self.grammar is not None:
            message.grammar = self.grammar

    def _chat(self) -> generate_pb2.Chat | None:
        messages = self.messages
        if self.prompt is not None:
            system: Sequence[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
            messages = [*system, {"role": "user", "content": self.prompt}]
        if messages is None:
            return None
        return generate_pb2.Chat(messages=[generate_pb2.ChatMessage(**message) for message in messages])

    def _tokens(self) -> generate_pb2.TokenIds | None:
        if self.token_ids is None:
            return None
        return generate_pb2.TokenIds(token_ids=struct.pack(f"<{len(self.token_ids)}i", *self.token_ids))


@dataclass(frozen=True)
class Statistics:
    """How speculation went, over the tokens that were emitted.

    `rounds` are verify steps after the prefill, `lone_roots` those whose tree was only the root; `draft_tokens` are the
    nodes drafted, roots excluded, and `accepted_tokens` those of them that were emitted. `acceptance_histogram[i]` counts
    rounds that gave i + 1 tokens. `ttft_seconds` and `total_seconds` run from admission by the gateway to the first
    token and to the end. `certificate_violations` count rounds whose tree might differ from that of full-width marginals;
    `rounds_by_nodes[n]` counts rounds whose tree had n nodes, root excluded. A stage with a dot in its name is a part of the
    stage before the dot.
    """

    output_tokens: int
    rounds: int
    lone_roots: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    ttft_seconds: float
    total_seconds: float
    stage_seconds: Mapping[str, float]
    certificate_violations: int
    rounds_by_nodes: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a round, bonus included: output tokens but the prefill's one, over rounds; 0 without rounds."""
        return (self.output_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the total time, prefill included; 0 if no time was measured."""
        return self.output_tokens / self.total_seconds if self.total_seconds else 0.0

    @classmethod
    def from_message(cls, message: generate_pb2.Statistics, *, output_tokens: int) -> Statistics:
        """The statistics of a message, for a generation of `output_tokens` tokens."""
        return cls(
            output_tokens=output_tokens,
            rounds=message.num_rounds,
            lone_roots=message.num_lone_roots,
            draft_tokens=message.num_draft_tokens,
            accepted_tokens=message.num_accepted_tokens,
            acceptance_histogram=tuple(message.acceptance_histogram),
            ttft_seconds=message.ttft_seconds,
            total_seconds=message.total_seconds,
            stage_seconds=dict(message.stage_seconds),
            certificate_violations=message.num_certificate_violations,
            rounds_by_nodes=tuple(message.rounds_by_nodes),
        )


@dataclass(frozen=True)
class TokenLogProbs:
    """How likely the target held an emitted token, and its likeliest tokens (id, log-probability), likeliest first.

    Log-probabilities are those of the target's own distribution, before penalties, temperature, top-k, top-p and min-p.
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_message(cls, message: tree_pb2.TokenLogProbs) -> TokenLogProbs:
        """The entry of a message."""
        return cls(message.log_prob, tuple(zip(message.top_token_ids, message.top_log_probs, strict=True)))


@dataclass(frozen=True)
class Generation:
    """A whole generation. `finish_reason` is "stop" or "length"; `stop` is the stop string that was met, if one was;
    `statistics` are those of the last stream, if it was resumed.

    `log_probs` has one entry a token, if they were asked for. `index` tells the generations of one request apart.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | None
    prompt_tokens: int
    statistics: Statistics
    model: str
    request_id: str
    seed: int
    log_probs: tuple[TokenLogProbs, ...] = ()
    index: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens of the output."""
        return len(self.token_ids)


@dataclass(frozen=True)
class ModelInfo:
    """What is served, and what a request may ask for. Counts are tokens, budgets are nodes without the root."""

    model: str
    max_context: int
    default_budget: int
    adaptive_budget: bool
    max_budget: int
    default_max_tokens: int
    max_prompt_characters: int
    vocabulary_size: int
    tokenizer_hash: str
    version: str
    protocol_version: int

    @classmethod
    def from_message(cls, message: generate_pb2.GetModelResponse) -> ModelInfo:
        """The description of a message."""
        return cls(
            model=message.model,
            max_context=message.max_context,
            default_budget=message.default_budget,
            adaptive_budget=message.adaptive_budget,
            max_budget=message.max_budget,
            default_max_tokens=message.default_max_tokens,
            max_prompt_characters=message.max_prompt_characters,
            vocabulary_size=message.fingerprint.vocabulary_size,
            tokenizer_hash=message.fingerprint.tokenizer_hash,
            version=message.version,
            protocol_version=message.protocol_version,
        )
