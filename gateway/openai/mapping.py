"""This file is how a body becomes a request: one line for each option, one name for each field that errors speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from pydantic import JsonValue

from gateway.openai.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from treewire.errors import InvalidRequest, TreewireError
from treewire.types import Acceptance, Message, Request, Sampling

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)
"""Options of sampling that have the same name and meaning on both sides."""

_ROLES = {"developer": "system"}
_FIELDS = {
    "text": "prompt",
    "tokens": "prompt",
    "chat": "messages",
    "chat content": "messages",
    "chat.messages": "messages",
    "ignore_end": "ignore_eos",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
}
_PROMPT_LENGTH = "prompt length"
_CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


_ANY_OBJECT = {"type": "object"}


class _Input(TypedDict, total=False):
    """Where a generation starts: one of them."""

    messages: Sequence[Message]
    text: str
    token_ids: Sequence[int]


class Structure(TypedDict, total=False):
    """What the output must match; not set or None matches anything."""

    json_schema: str | Mapping[str, JsonValue] | None
    regex: str | None
    grammar: str | None


def chat_request(body: ChatCompletionRequest) -> Request:
    """The request of a chat completion."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs goes with logprobs", metadata={"field": "top_logprobs"})
    num_log_probs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    return _request(body, max_tokens, num_log_probs, _Input(messages=to_messages(body.messages)), _wanted_format(body))


def _wanted_format(body: ChatCompletionRequest) -> Structure:
    match body.response_format:
        case JsonSchemaFormat(json_schema=wanted):
            return Structure(json_schema=wanted.schema_)
        case JsonObjectFormat():
            return Structure(json_schema=_ANY_OBJECT)
    return Structure()


def _structure(body: GenerationBody) -> Structure:
    wanted = body.structured_outputs
    if wanted is None:
        return Structure()
    return Structure(json_schema=wanted.json_, regex=wanted.regex, grammar=wanted.grammar)


def completion_request(body: CompletionRequest) -> Request:
    """The request of a completion. InvalidRequest for more than one prompt."""
    return _request(body, body.max_tokens, body.logprobs, _prompt(body.prompt), Structure())


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The turns as the chat template takes them."""
    return [Message(role=_ROLES.get(turn.role, turn.role), content=turn.text) for turn in messages]


def _prompt(prompt: str | list[int] | list[str]) -> _Input:
    if isinstance(prompt, str):
        return _Input(text=prompt)
    token_ids = [each for each in prompt if isinstance(each, int)]
    texts = [each for each in prompt if isinstance(each, str)]
    if not texts:
        return _Input(token_ids=token_ids)
    if len(texts) > 1:
        raise InvalidRequest(f"prompt has {len(texts)} prompts, 1 is taken", metadata={"field": "prompt"})
    return _Input(text=texts[0])


def _request(
    body: GenerationBody, max_tokens: int | None, num_log_probs: int | None, given: _Input, wanted_format: Structure
) -> Request:
    structure = _structure(body)
    if any(wanted_format.values()) and any(structure.values()):
        raise InvalidRequest("one of response_format and structured_outputs is taken", metadata={"field": "response_format"})
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream", metadata={"field": "stream_options"})
    body.check_neutral()
    return Request(
        **given,
        **(wanted_format if any(wanted_format.values()) else structure),
        max_tokens=max_tokens,
        sampling=Sampling(
            **{name: getattr(body, name) for name in _SAMPLING},
            top_k=None if body.top_k is None else max(0, body.top_k),
            seed=None if body.seed is None else body.seed % 2**64,
        ),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_end=bool(body.ignore_eos),
        budget=body.budget,
        width=body.width,
        accept=None if body.accept is None else Acceptance(body.accept),
        hybrid_width=body.hybrid_width,
        num_log_probs=num_log_probs,
        n=body.n,
    )


def param_of(error: TreewireError) -> str | None:
    """The field of the body that an error is about."""
    field = error.metadata.get("field")
    if field == "sampling":  # the message names the parameter first
        return error.message.removeprefix("sampling: ").split(" ")[0]
    if field is None or field == _PROMPT_LENGTH:
        return None
    return _FIELDS.get(field, field.removeprefix("chat."))


def code_of(error: TreewireError) -> str:
    """A word for programs: what went wrong."""
    if error.metadata.get("field") == _PROMPT_LENGTH:
        return _CONTEXT_LENGTH_EXCEEDED
    return error.reason.lower()
