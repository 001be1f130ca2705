"""This file is what a caller may ask of the gateway: a request, checked field by field and with its defaults resolved."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from gateway.stopping import StopRules
from gateway.tokenization import Tokenization
from treewire import wire
from treewire.core.noise import MAX_SEED
from treewire.core.sampling import Sampling
from treewire.core.structure import Structure
from treewire.errors import InvalidRequest, Unsupported
from treewire.runtime.calls import CallerLimits
from treewire.v1 import generate_pb2, tree_pb2

_ROLES = ("system", "user", "assistant")
_MAX_MESSAGES = 1024
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARACTERS = 256
_MAX_STOP_TOKENS = 64
_MAX_HYBRID_WIDTH = 16
MAX_LOG_PROBS = 20
MAX_GENERATIONS = 16
DEFAULT_HYBRID_WIDTH = 3


@dataclass(frozen=True)
class RequestLimits:
    """What this gateway takes, and what it fills in.

    `adaptive_budget` is the most nodes of trees whose budget is chosen in each round, where a request sets none; 0 if
    `default_budget` holds then.
    """

    max_context: int
    max_prompt_characters: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_budget: int
    default_budget: int
    adaptive_budget: int
    max_width: int
    default_max_tokens: int
    default_temperature: float
    vocabulary_size: int
    end_token_ids: tuple[int, ...]

    def within(self, limits: CallerLimits) -> RequestLimits:
        """These limits, or the caller's own where those are tighter."""
        return replace(
            self,
            max_prompt_tokens=min(self.max_prompt_tokens, limits.max_prompt_tokens or self.max_prompt_tokens),
            max_output_tokens=min(self.max_output_tokens, limits.max_tokens or self.max_output_tokens),
        )


@dataclass(frozen=True)
class GenerationRequest:
    """A request that can be run as it is. `prompt` ends with `delivered`, what an earlier stream of it has given.

    `adapts` is True if the budget is chosen in each round; `budget` is then the most.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    rules: StopRules
    budget: int
    width: int
    include_rounds: bool
    delivered: tuple[int, ...] = ()
    accept: tree_pb2.Acceptance.ValueType = tree_pb2.ACCEPTANCE_SHARED_NOISE
    hybrid_width: int = DEFAULT_HYBRID_WIDTH
    num_log_probs: int | None = None
    structure: Structure | None = None
    index: int = 0
    num_generations: int = 1
    adapts: bool = False

    @property
    def length_limit(self) -> int:
        """Length of the sequence at which the generation ends at the latest."""
        return len(self.prompt) - len(self.delivered) + self.rules.max_tokens

    def generations(self) -> tuple[GenerationRequest, ...]:
        """The generations that were asked for: this one, and others that differ in index and seed."""
        return tuple(
            replace(self, index=index, sampling=replace(self.sampling, seed=(self.sampling.seed + index) & MAX_SEED))
            for index in range(self.num_generations)
        )


def parse(message: generate_pb2.GenerateRequest, tokenization: Tokenization, limits: RequestLimits) -> GenerationRequest:
    """The checked request. Raises InvalidRequest or Unsupported with field, value and limit. May take milliseconds."""
    _refuse_unsupported(message)
    prompt = _prompt(message, tokenization, limits)
    max_tokens = _max_tokens(message, len(prompt), limits)
    rules = StopRules(
        max_tokens=max_tokens,
        end_token_ids=frozenset(_stop_token_ids(message, limits)),
        strings=_stop_strings(message),
    )
    delivered = _delivered(message, len(prompt), max_tokens, limits)
    sampling = _sampling(message, limits)
    adapts = _adapts(message, sampling, limits)
    return GenerationRequest(
        prompt=(*prompt, *delivered),
        sampling=sampling,
        rules=rules,
        budget=limits.adaptive_budget if adapts else _in_range(message, "budget", limits.default_budget, 0, limits.max_budget),
        adapts=adapts,
        width=_in_range(message, "width", limits.max_width, 1, limits.max_width),
        include_rounds=message.include_rounds,
        accept=message.accept or tree_pb2.ACCEPTANCE_SHARED_NOISE,
        hybrid_width=_in_range(message, "hybrid_width", DEFAULT_HYBRID_WIDTH, 1, _MAX_HYBRID_WIDTH),
        num_log_probs=_in_range(message, "num_log_probs", 0, 0, MAX_LOG_PROBS) if message.HasField("num_log_probs") else None,
        num_generations=_in_range(message, "n", 1, 1, MAX_GENERATIONS),
        delivered=delivered,
        structure=wire.structure_from_message(message),
    )


def _invalid(field: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {value}, {allowed}", metadata={"field": field, "value": str(value)})


def _refuse_unsupported(message: generate_pb2.GenerateRequest) -> None:
    if message.accept not in tree_pb2.Acceptance.values():
        raise _invalid("accept", message.accept, f"known are {', '.join(tree_pb2.Acceptance.keys())}")
    if message.accept == tree_pb2.ACCEPTANCE_CALLER:
        raise _unsupported("accept", "ACCEPTANCE_CALLER is for callers of the verify service, who get the tree's posterior")
    if message.HasField("num_prompt_log_probs"):
        raise _unsupported("num_prompt_log_probs", "the logits of a prompt are computed for its last token alone")
    if structure := message.WhichOneof("structure"):
        if message.ignore_end:
            raise _unsupported("ignore_end", f"what must match a {structure} ends where that ends")
        if message.sampling.min_tokens:
            raise _unsupported("min_tokens", f"what must match a {structure} ends where that ends")
    if message.HasField("hybrid_width") and message.accept != tree_pb2.ACCEPTANCE_HYBRID:
        raise _invalid("hybrid_width", message.hybrid_width, "it goes with ACCEPTANCE_HYBRID")


def _unsupported(field: str, reason: str) -> Unsupported:
    return Unsupported(f"{field}: {reason}", metadata={"field": field})


def _prompt(message: generate_pb2.GenerateRequest, tokenization: Tokenization, limits: RequestLimits) -> tuple[int, ...]:
    match message.WhichOneof("input"):
        case "text":
            _check_characters("text", len(message.text), limits)
            token_ids = tuple(tokenization.encode(message.text, add_special_tokens=True))
        case "chat":
            token_ids = tuple(_chat(message.chat, tokenization, limits))
        case "tokens":
            token_ids = wire.token_ids_from_bytes(
                message.tokens.token_ids,
                field="tokens",
                max_length=limits.max_context,
                vocabulary_size=limits.vocabulary_size,
            )
        case _:
            raise InvalidRequest("input is empty, one of text, chat and tokens is needed", metadata={"field": "input"})
    longest = min(limits.max_context - 1, limits.max_prompt_tokens)
    if not 1 <= len(token_ids) <= longest:
        raise _invalid("prompt length", f"{len(token_ids)} tokens", f"from 1 to {longest} are taken")
    return token_ids


def _check_characters(field: str, length: int, limits: RequestLimits) -> None:
    if not 1 <= length <= limits.max_prompt_characters:
        raise _invalid(field, f"{length} characters long", f"from 1 to {limits.max_prompt_characters:,} are taken")


def _chat(chat: generate_pb2.Chat, tokenization: Tokenization, limits: RequestLimits) -> list[int]:
    if not 1 <= len(chat.messages) <= _MAX_MESSAGES:
        raise _invalid("chat.messages", f"{len(chat.messages)} messages long", f"from 1 to {_MAX_MESSAGES} are taken")
    for number, turn in enumerate(chat.messages):
        if turn.role not in _ROLES:
            raise _invalid(f"chat.messages[{number}].role", repr(turn.role[:32]), f"known are {', '.join(_ROLES)}")
    _check_characters("chat content", sum(len(turn.content) for turn in chat.messages), limits)
    try:
        return tokenization.encode_chat([{"role": turn.role, "content": turn.content} for turn in chat.messages])
    except ValueError as error:
        raise InvalidRequest(f"chat: {error}", metadata={"field": "chat"}) from error


def _max_tokens(message: generate_pb2.GenerateRequest, prompt_length: int, limits: RequestLimits) -> int:
    room = limits.max_context - prompt_length
    if not message.HasField("max_tokens"):
        return min(limits.default_max_tokens, limits.max_output_tokens, room)
    if message.max_tokens < 1:
        raise _invalid("max_tokens", message.max_tokens, "at least 1 is taken")
    if message.max_tokens > limits.max_output_tokens:
        raise _invalid("max_tokens", message.max_tokens, f"at most {limits.max_output_tokens} are taken")
    return min(message.max_tokens, room)


def _delivered(
    message: generate_pb2.GenerateRequest, prompt_length: int, max_tokens: int, limits: RequestLimits
) -> tuple[int, ...]:
    if not message.HasField("delivered"):
        return ()
    if not message.sampling.HasField("seed"):
        raise InvalidRequest("delivered needs the seed that the generation started with", metadata={"field": "delivered"})
    if message.n > 1:
        raise _invalid("n", message.n, "1 goes with delivered")
    return wire.token_ids_from_bytes(
        message.delivered.token_ids,
        field="delivered",
        max_length=min(max_tokens, limits.max_context - prompt_length),
        vocabulary_size=limits.vocabulary_size,
    )


def _stop_strings(message: generate_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > _MAX_STOP_STRINGS:
        raise _invalid("stop", f"{len(message.stop)} strings long", f"at most {_MAX_STOP_STRINGS} are taken")
    for string in message.stop:
        if not 1 <= len(string) <= _MAX_STOP_CHARACTERS:
            raise _invalid("stop", f"a string of {len(string)} characters", f"from 1 to {_MAX_STOP_CHARACTERS} are taken")
    return tuple(message.stop)


def _adapts(message: generate_pb2.GenerateRequest, sampling: Sampling, limits: RequestLimits) -> bool:
    """True if the budget is chosen in each round. Never under hybrid acceptance: its law holds only if the value of a drawn
    token does not decide the tree's shape, and that value is part of what a tree promises. Nor for structured output: what a
    drafter's probabilities are worth there says nothing of free text, and nodes that the structure forbids cost nothing."""
    if message.HasField("budget") or limits.adaptive_budget == 0 or message.WhichOneof("structure") is not None:
        return False
    return sampling.is_greedy or message.accept != tree_pb2.ACCEPTANCE_HYBRID


def _stop_token_ids(message: generate_pb2.GenerateRequest, limits: RequestLimits) -> tuple[int, ...]:
    if len(message.stop_token_ids) > _MAX_STOP_TOKENS:
        raise _invalid("stop_token_ids", f"{len(message.stop_token_ids)} tokens long", f"at most {_MAX_STOP_TOKENS} are taken")
    for token_id in message.stop_token_ids:
        if not 0 <= token_id < limits.vocabulary_size:
            raise _invalid("stop_token_ids", token_id, f"the vocabulary has ids from 0 to {limits.vocabulary_size - 1}")
    return (*message.stop_token_ids, *(() if message.ignore_end else limits.end_token_ids))


def _sampling(message: generate_pb2.GenerateRequest, limits: RequestLimits) -> Sampling:
    """Complete parameters. Without stop tokens of their own, min_tokens holds back what ends the generation."""
    defaults = Sampling(temperature=limits.default_temperature)
    sampling = wire.sampling_from_message(message.sampling, defaults, vocabulary_size=limits.vocabulary_size)
    if sampling.min_tokens and not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=_stop_token_ids(message, limits))
    return sampling if message.sampling.HasField("seed") else replace(sampling, seed=secrets.randbits(63))


def _in_range(message: generate_pb2.GenerateRequest, field: str, default: int, lowest: int, highest: int) -> int:
    """The value of an optional field, or its default."""
    if not message.HasField(field):  # type: ignore[arg-type]
        return default
    value: int = getattr(message, field)
    if not lowest <= value <= highest:
        raise _invalid(field, value, f"from {lowest} to {highest} is taken")
    return value
