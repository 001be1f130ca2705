"""This file is text on the outside, token ids on the inside: encoding, chat templates, and decoding as tokens arrive."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from treewire.vocabulary import (
    SIMULATED_END_TOKEN_ID,
    WORD_BOUNDARY,
    load_tokenizer,
    simulated_tokenizer,
    token_bytes,
    vocabulary_hash,
)

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"

_SIMULATED_VOCABULARY_SIZE = 1024
_SIMULATED_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}<|turn|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|turn|>{% endif %}"
)
_DEFAULT_TEMPLATE_NAME = "default"
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


class Detokenizer(Protocol):
    """Text of one generation as its tokens arrive.

    However the ids are cut into pushes, the pushed texts and the finish together are the tokenizer's decoding of all of them.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle; what later tokens could still change is held back."""
        ...

    def finish(self) -> str:
        """The text that was held back; incomplete characters become U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For tokenizers whose every token is a string of bytes: decodes UTF-8 as the bytes arrive.

    `token_bytes` are the bytes of each id; an id outside of it has none.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"".join(self._token_bytes.get(token_id, b"") for token_id in token_ids))

    def finish(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a window of the tokens before and those not yet settled.

    `silent_ids` are left out. Tokens are unsettled while they end in one of `byte_ids` (a run of single bytes is decoded as a
    whole by byte fallback) or in an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer, silent_ids: frozenset[int], byte_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._byte_ids = byte_ids
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join(self._push_one(token_id) for token_id in token_ids if token_id not in self._silent_ids)

    def finish(self) -> str:
        """See Detokenizer."""
        return self._settle(self._pending_text())

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._pending_text()
        return "" if text.endswith(REPLACEMENT_CHARACTER) else self._settle(text)

    def _pending_text(self) -> str:
        before = self._decode(self._settled)
        return self._decode(self._settled + self._pending)[len(before) :]

    def _settle(self, text: str) -> str:
        if self._pending:
            self._settled, self._pending = self._pending, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, eq=False)
class Tokenization:
    """A target's tokenizer, its chat template, and the ids that end a turn. Raises ValueError on a malformed template.

    `vocabulary_size` counts the ids the target can score, which may be more than the tokenizer has tokens for.
    `template_values` are what the template may name beside the messages, such as `bos_token`.
    """

    tokenizer: Tokenizer
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    chat_template: str | None = None
    template_values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Build everything now: a malformed template is refused at start-up, and no request waits for a table."""
        _ = self._template, self._audible_bytes, self.hash

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenization:
        """Read a model directory in the Hugging Face layout. Raises ValueError if something in it is missing or malformed."""
        tokenizer = load_tokenizer(directory)
        config, settings = _read_json(directory / "config.json"), _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        return cls(
            tokenizer=tokenizer,
            vocabulary_size=_vocabulary_size(config, tokenizer),
            end_token_ids=_end_token_ids(generation) or _end_token_ids(config),
            chat_template=_chat_template(directory, settings),
            template_values=_template_values(settings),
        )

    @classmethod
    def simulated(cls, vocabulary_size: int = _SIMULATED_VOCABULARY_SIZE) -> Tokenization:
        """The tokenization of the simulated engines. Raises ValueError if the size is below 259."""
        tokenizer = simulated_tokenizer(vocabulary_size)
        return cls(tokenizer, vocabulary_size, (SIMULATED_END_TOKEN_ID,), _SIMULATED_CHAT_TEMPLATE)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the vocabulary, as the model services compute it."""
        return vocabulary_hash(self.tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; with the tokens the tokenizer puts around a text if asked."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer starts. Raises ValueError as `render_chat` does."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the text the model was trained on, up to where its answer starts.

        Raises ValueError if the model has no chat template, or if the template refuses the messages or fails on them.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; send a prompt instead of messages")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self.template_values)
        except _TEMPLATE_FAILURES as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def piece(self, token_id: int) -> str:
        """The text of one token, for people: bytes that are no whole character as \\xNN, an id without a token as <id>."""
        if self._token_bytes is not None and token_id in self._token_bytes:
            return self._token_bytes[token_id].decode("utf-8", errors="backslashreplace")
        token: str | None = self.tokenizer.id_to_token(token_id)
        return f"<{token_id}>" if token is None else token.replace(WORD_BOUNDARY, " ")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, those of a special token's name included; none for an id without a token."""
        if self._token_bytes is not None:
            return self._token_bytes.get(token_id, b"")
        token: str = self.tokenizer.id_to_token(token_id) or ""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        return token.replace(WORD_BOUNDARY, " ").encode("utf-8")

    def decoder(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one generation."""
        silent_ids = self._special_ids if skip_special_tokens else frozenset()
        if self._token_bytes is None:
            return WindowDetokenizer(self.tokenizer, silent_ids, self._byte_ids)
        if skip_special_tokens:
            return ByteLevelDetokenizer(self._audible_bytes)
        return ByteLevelDetokenizer(self._token_bytes)

    @cached_property
    def _template(self) -> jinja2.Template | None:
        if self.chat_template is None:
            return None
        try:
            return _template_environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is malformed: {error}") from error

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Ids of byte fallback's tokens <0x00> to <0xFF>."""
        tokens = (f"<0x{byte:02X}>" for byte in range(256))
        return frozenset(token_id for token in tokens if (token_id := self.tokenizer.token_to_id(token)) is not None)

    @cached_property
    def _token_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of every id; None if the tokenizer is not byte-level."""
        return token_bytes(self.tokenizer)

    @cached_property
    def _audible_bytes(self) -> Mapping[int, bytes]:
        """The bytes of every id that is not special."""
        return {token_id: text for token_id, text in (self._token_bytes or {}).items() if token_id not in self._special_ids}


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: templates are a model's data, so they run in a sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON with its characters as they are; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> Mapping[str, object]:
    """The object in that file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _vocabulary_size(config: Mapping[str, object], tokenizer: Tokenizer) -> int:
    size = config.get("vocab_size")
    return size if isinstance(size, int) else tokenizer.get_vocab_size(with_added_tokens=True)


def _end_token_ids(config: Mapping[str, object]) -> tuple[int, ...]:
    """`eos_token_id`, one id or a list of them; none if absent."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in ids if isinstance(token_id, int))


def _chat_template(directory: Path, settings: Mapping[str, object]) -> str | None:
    """From chat_template.jinja, or from the settings, where it is a text or a list of named texts."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get(_DEFAULT_TEMPLATE_NAME)
    return template if isinstance(template, str) else None


def _template_values(settings: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by name; each is a text or an object with the text as its content."""
    values = {name: settings.get(name) for name in _TEMPLATE_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
