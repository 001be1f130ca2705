"""This file is what HTTP callers may send: OpenAI's fields, those that vLLM adds, and what of them is served.

A field is in one of four groups: it has a meaning here; it has none and is taken (`user`); it is refused unless it asks for
nothing (`_only`); it is unknown and refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from gateway.requests import MAX_GENERATIONS, MAX_LOG_PROBS
from treewire.errors import Unsupported

_MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1
_MIN_INT64 = -(2**63)

Count = Annotated[int, Field(ge=0, le=_MAX_INT32)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]


def _only(*values: JsonValue) -> Any:
    """A field that is not served: null and these values, which ask for nothing, are taken."""
    told = " or ".join(json.dumps(value) for value in (None, *values))
    return Field(None, description=f"Not served: {told}.", json_schema_extra={"enum": [None, *values]})


def _within(description: str, **limits: float) -> Any:
    """A number whose limits, in JSON schema's words, the document tells; they are checked with the rest of the sampling."""
    schema: dict[str, JsonValue] = {"anyOf": [{"type": "number", **limits}, {"type": "null"}]}
    return Field(None, description=description, json_schema_extra=schema)


class Body(BaseModel):
    """The body of a request: types as in JSON, no unknown fields, no infinite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """How a stream is cut, and what ends it."""

    include_usage: bool | None = Field(None, description="A last chunk with usage and metrics.")
    per_token: bool | None = Field(None, description="One chunk for each token instead of one for each commit.")


class StructuredOutputs(Body):
    """vLLM's: what the whole output must match, one of them."""

    json_: str | dict[str, JsonValue] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    grammar: str | None = Field(None, description="GBNF, from its rule root.")


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    model: str | None = Field(None, max_length=4096, description="The served model; nothing else is taken.")
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32, description="Most tokens to generate.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stop: str | list[str] | None = Field(None, description="Strings that end the generation; the text ends before them.")

    temperature: float | None = _within("0 is greedy.", minimum=0.0, maximum=100.0)
    top_p: float | None = _within("Keep the likeliest tokens up to this probability.", exclusiveMinimum=0.0, maximum=1.0)
    seed: int | None = Field(None, ge=_MIN_INT64, le=_MAX_UINT64, description="The same seed gives the same tokens.")
    presence_penalty: float | None = _within(
        "Subtracted from the scores of tokens in the output.", minimum=-100.0, maximum=100.0
    )
    frequency_penalty: float | None = _within(
        "Subtracted once for each time a token is in the output.", minimum=-100.0, maximum=100.0
    )
    logit_bias: dict[TokenId, float] | None = Field(None, description="Added to the scores of tokens, by id.")

    top_k: int | None = Field(None, ge=-1, le=_MAX_INT32, description="vLLM's: keep this many tokens; 0 and -1 keep all.")
    min_p: float | None = _within("vLLM's: drop tokens below this fraction of the likeliest.", minimum=0.0, maximum=1.0)
    repetition_penalty: float | None = _within(
        "vLLM's: divides the scores of tokens seen; 1 is off.", exclusiveMinimum=0.0, maximum=100.0
    )
    min_tokens: Count | None = Field(None, description="vLLM's: no end before this many tokens.")
    stop_token_ids: list[TokenId] | None = Field(None, description="vLLM's: tokens that end the generation.")
    ignore_eos: bool | None = Field(None, description="vLLM's: generate on past the model's own end.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: what the whole output must match.")
    return_token_ids: bool | None = Field(None, description="vLLM's: token_ids in each choice.")
    budget: Count | None = Field(None, description="treewire's: nodes of each draft tree; 0 turns drafting off.")
    width: Count | None = Field(None, description="treewire's: tokens at each depth of a tree; 1 drafts chains.")
    accept: Literal["shared_noise", "hybrid"] | None = Field(None, description="treewire's: the rule of acceptance.")
    hybrid_width: Count | None = Field(None, description="treewire's: children of a node under hybrid acceptance.")

    user: str | None = Field(None, description="Taken, has no effect.")
    metadata: dict[str, JsonValue] | None = Field(None, description="Taken, has no effect.")
    safety_identifier: str | None = Field(None, description="Taken, has no effect.")
    prompt_cache_key: str | None = Field(None, description="Taken, has no effect.")

    n: int | None = Field(None, ge=1, le=MAX_GENERATIONS, description="Choices, of the seeds seed, seed + 1, ...")
    service_tier: JsonValue = _only("auto", "default")

    def check_neutral(self) -> None:
        """Unsupported, with the field, if the body asks for something that is not served."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(field.json_schema_extra, dict) and "enum" in field.json_schema_extra and value is not None:
                _check_neutral(name, value, field.json_schema_extra["enum"])

    @property
    def is_per_token(self) -> bool:
        """True for one chunk a token."""
        return bool(self.stream_options and self.stream_options.per_token)

    @property
    def includes_usage(self) -> bool:
        """True for a last chunk with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def _check_neutral(name: str, value: JsonValue, neutral: JsonValue) -> None:
    assert isinstance(neutral, list)
    if not any(type(value) is type(each) and value == each for each in neutral):
        taken = " or ".join(json.dumps(each) for each in neutral)
        raise Unsupported(f"{name} is not served, {taken} is taken", metadata={"field": name})


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class JsonSchema(Body):
    """A schema that the answer must match, always and to the letter: `strict` false asks for no less."""

    name: str = Field(max_length=64, description="Taken, has no effect.")
    description: str | None = Field(None, description="Taken, has no effect.")
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = Field(None, description="Taken, has no effect.")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object, whatever is in it."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatMessage(Body):
    """One turn. `developer` is another word for system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, description="Taken, has no effect.")

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, description="The conversation, oldest first.")
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32, description="Today's name of max_tokens; it wins.")

    logprobs: bool | None = Field(None, description="The log-probability of every token, under the model's own distribution.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOG_PROBS, description="With logprobs: so many of the likeliest tokens beside each."
    )
    response_format: ResponseFormat | None = Field(None, description="What the whole answer must match.")
    tools: JsonValue = _only([])
    tool_choice: JsonValue = _only("none", "auto")
    parallel_tool_calls: bool | None = Field(None, description="Taken, has no effect without tools.")
    functions: JsonValue = _only([])
    function_call: JsonValue = _only("none", "auto")
    modalities: JsonValue = _only(["text"])
    audio: JsonValue = _only()
    prediction: JsonValue = _only()
    web_search_options: JsonValue = _only()
    reasoning_effort: JsonValue = _only("none")
    verbosity: JsonValue = _only("medium")
    store: JsonValue = _only(False)


class CompletionRequest(GenerationBody):
    """The body of /v1/completions."""

    prompt: str | list[TokenId] | list[str] = Field(description="A text, or its token ids; a list of texts has one.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOG_PROBS, description="Log-probabilities, with so many of the likeliest tokens beside each."
    )

    best_of: JsonValue = _only(1)
    echo: JsonValue = _only(False)
    suffix: JsonValue = _only("")


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = Field(True, description="What the tokenizer puts around a prompt; chat templates bring theirs.")


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
