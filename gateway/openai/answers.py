"""This file is what HTTP callers are given: OpenAI's answers and chunks, and the metrics block of vLLM.

Only what is set is sent, so that an option that was not asked for adds no field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal

from pydantic import BaseModel

from gateway.generations import Finished


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, finished: Sequence[Finished]) -> Usage:
        """The usage of a request's generations: its prompt once, the output of all."""
        prompt, output = finished[0].num_prompt_tokens, sum(each.num_output_tokens for each in finished)
        return cls(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


class SpeculativeDecoding(BaseModel):
    """How speculation went, in the shape that vLLM documents (Per-Request Acceptance Metrics).

    A step is a round, drafted or not. `acceptance_histogram[j]` counts those that accepted j drafted tokens, from 0 to
    `num_spec_tokens`, the deepest path a tree could have. Nodes of trees are draft tokens, so the acceptance rate counts
    every branch that was not taken.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int

    @classmethod
    def of(cls, finished: Sequence[Finished], *, longest_path: int) -> SpeculativeDecoding | None:
        """The block of a request, over the rounds of all its generations; None if nothing was drafted."""
        num_rounds = sum(each.statistics.rounds for each in finished)
        num_drafted = sum(each.statistics.draft_tokens for each in finished)
        num_accepted = sum(each.statistics.accepted_tokens for each in finished)
        if not num_drafted:
            return None
        counts = zip_longest(range(longest_path + 1), *(each.acceptance_counts for each in finished), fillvalue=0)
        return cls(
            mean_acceptance_length=1 + num_accepted / num_rounds,
            draft_acceptance_rate=num_accepted / num_drafted,
            acceptance_histogram=[sum(counts_of_each) for _, *counts_of_each in counts],
            num_spec_steps=num_rounds,
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_drafted,
            num_spec_tokens=longest_path,
        )


class Metrics(BaseModel):
    """What is told of a request beside its text.

    Of several generations: the first one's time to the first token, the longest time of any, the sum of all stages.
    """

    time_to_first_token_seconds: float
    total_seconds: float
    stage_seconds: Mapping[str, float]
    speculative_decoding: SpeculativeDecoding | None

    @classmethod
    def of(cls, finished: Sequence[Finished], *, longest_path: int) -> Metrics:
        """The metrics of a request's generations, in the order of their index."""
        stage_seconds: Counter[str] = Counter()
        for each in finished:
            stage_seconds.update(each.statistics.stage_seconds)
        return cls(
            time_to_first_token_seconds=finished[0].statistics.ttft_seconds,
            total_seconds=max(each.statistics.total_seconds for each in finished),
            stage_seconds=stage_seconds,
            speculative_decoding=SpeculativeDecoding.of(finished, longest_path=longest_path),
        )


class LikelyToken(BaseModel):
    """A token with its log-probability; `bytes` are its own, since a token need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogProbs(LikelyToken):
    """A token of the answer, and those that the model held likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogProbs(BaseModel):
    """One entry for each token of a choice, or of a piece of one."""

    content: list[ChatTokenLogProbs]
    refusal: None = None


class TextLogProbs(BaseModel):
    """One entry for each token of a continuation, or of a piece of one.

    `text_offset` is where in the continuation's text a token's begins; null instead of likeliest tokens if none were asked for.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


FinishReason = Literal["stop", "length"]


class Ending(BaseModel):
    """What the choices of answers and chunks have in common."""

    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    token_ids: list[int] | None = None


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Ending):
    """A whole answer."""

    message: AssistantMessage
    logprobs: ChatLogProbs | None = None


class Delta(BaseModel):
    """What a chunk adds to the model's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Ending):
    """A piece of an answer."""

    delta: Delta
    logprobs: ChatLogProbs | None = None


class TextChoice(Ending):
    """A whole continuation, or a piece of one."""

    text: str
    logprobs: TextLogProbs | None = None


class Answer(BaseModel):
    """What all answers have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: Metrics | None = None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Answer):
    """A piece of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(Answer):
    """The answer of /v1/completions, or a piece of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["treewire"] = "treewire"
    max_model_len: int


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Alive(BaseModel):
    """The answer of /health and /ready."""

    status: Literal["alive", "ready"]


class Version(BaseModel):
    """The answer of /version."""

    version: str
    protocol_version: int


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The answer of every request that failed."""

    error: ErrorBody


def to_json(answer: BaseModel) -> str:
    """The answer without what was not set, null where it was set so."""
    return answer.model_dump_json(exclude_unset=True)
