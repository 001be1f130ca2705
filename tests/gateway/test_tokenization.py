"""Text and token ids: encoding, chat templates, and decoding that never shows a broken character."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.tokenization import REPLACEMENT_CHARACTER, Detokenizer, Tokenization
from treewire.vocabulary import simulated_tokenizer, vocabulary_hash
from treewire.weights import DEFAULT_MODEL, default_cache_dir, resolve

SIMULATED = Tokenization.simulated()
FIRST_BYTE = 3
HARD_TEXTS = [
    "👩‍💻👨‍👩‍👧 🇯🇵",
    "日本語 中文 한국어",
    "e\u0301 n\u0303 Z\u0351\u036b",
    "naïve\r\n\t\0",
    " leading",
    "",
    "\ufffd",
    "a\ufffd",
]


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: pieces with U+2581 for spaces, single bytes as <0x..>, one special token."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "a", "▁", "é", "木", "\ufffd"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


BYTE_FALLBACK = Tokenization(byte_fallback_tokenizer(), 263, (0,))


def pieces_of(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids cut at those places."""
    places = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    return [token_ids[start:end] for start, end in pairwise(places)]


def decoded(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    """What each push gives, and the finish."""
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


simulated_ids = st.lists(
    st.integers(0, SIMULATED.vocabulary_size - 1)
    | st.integers(FIRST_BYTE + 0x80, FIRST_BYTE + 0xFF)
    | st.sampled_from([FIRST_BYTE + byte for byte in "🌳".encode()]),
    max_size=40,
)
cuts = st.lists(st.integers(0, 40), max_size=10)


@given(simulated_ids, cuts, st.booleans())
def test_pushes_together_are_the_whole_decoding(token_ids: list[int], cuts: list[int], skip: bool) -> None:
    """However ids, broken UTF-8 included, are cut, the text is the tokenizer's own decoding of all of them."""
    texts = decoded(SIMULATED.decoder(skip), pieces_of(token_ids, cuts))
    assert "".join(texts) == SIMULATED.tokenizer.decode(token_ids, skip_special_tokens=skip)


byte_fallback_ids = st.lists(
    st.integers(0, 262) | st.integers(257, 262) | st.sampled_from([1 + byte for byte in "🌳é".encode()]), max_size=30
)


@given(byte_fallback_ids, cuts, st.booleans())
def test_byte_fallback_tokenizers_decode_the_same(token_ids: list[int], cuts: list[int], skip: bool) -> None:
    """The same holds where a run of single bytes is decoded as a whole and the first space is dropped."""
    texts = decoded(BYTE_FALLBACK.decoder(skip), pieces_of(token_ids, cuts))
    assert "".join(texts) == BYTE_FALLBACK.tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_no_push_shows_part_of_a_character(text: str) -> None:
    """Of a text encoded byte by byte every push is whole characters, and nothing is left for the finish."""
    token_ids = [FIRST_BYTE + byte for byte in text.encode()]
    *pushes, rest = decoded(SIMULATED.decoder(), [[token_id] for token_id in token_ids])
    assert [push for push in pushes if push] == list(text)
    assert rest == ""


def test_an_unfinished_character_is_held_back_until_the_end() -> None:
    """Three of a tree's four bytes show nothing; at the end they are one U+FFFD."""
    detokenizer = SIMULATED.decoder()
    assert [detokenizer.push([FIRST_BYTE + byte]) for byte in "🌳".encode()[:3]] == ["", "", ""]
    assert detokenizer.finish() == REPLACEMENT_CHARACTER


def test_ids_without_a_token_are_silent() -> None:
    """An id that the target can score but the tokenizer has no token for gives no text."""
    assert SIMULATED.decoder().push([FIRST_BYTE + ord("a"), 5000, FIRST_BYTE + ord("b")]) == "ab"


@given(st.text() | st.sampled_from(HARD_TEXTS))
def test_simulated_texts_come_back(text: str) -> None:
    """Any text can be encoded with the simulated vocabulary, and decodes to itself."""
    token_ids = SIMULATED.encode(text, add_special_tokens=True)
    assert all(token_id < SIMULATED.vocabulary_size for token_id in token_ids)
    assert "".join(decoded(SIMULATED.decoder(skip_special_tokens=False), [token_ids])) == text


def test_the_simulated_vocabulary_is_as_large_as_asked() -> None:
    """Every id has a token, ids 3 to 258 are the bytes, words are one token, and too small a size is refused."""
    for size in (259, 1024, 12_000):
        tokenizer = simulated_tokenizer(size)
        assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert SIMULATED.encode("a\n", False) == [FIRST_BYTE + ord("a"), FIRST_BYTE + ord("\n")]
    assert [len(SIMULATED.encode(text, False)) for text in ("guess the tree", "木", "🌳")] == [3, 1, 1]
    assert SIMULATED.end_token_ids == (2,)
    with pytest.raises(ValueError, match="vocabulary size is 258, the simulated one is at least 259"):
        Tokenization.simulated(258)


def test_hashes_agree_exactly_when_vocabularies_do() -> None:
    """The gateway's hash is the one a model service computes; another size gives another."""
    assert SIMULATED.hash == vocabulary_hash(simulated_tokenizer(1024))
    assert SIMULATED.hash != Tokenization.simulated(1025).hash


def test_the_simulated_chat_is_specials_around_text() -> None:
    """Roles and contents are framed by the special tokens, and the answer's start ends the prompt."""
    token_ids = SIMULATED.encode_chat([{"role": "user", "content": "木"}])
    assert (
        SIMULATED.render_chat([{"role": "user", "content": "木"}]) == "<|start|>user<|turn|>木<|end|><|start|>assistant<|turn|>"
    )
    assert [token_id for token_id in token_ids if token_id < FIRST_BYTE] == [0, 1, 2, 0, 1]


def model_directory(directory: Path, **settings: object) -> Path:
    """A model directory with the simulated tokenizer and that tokenizer_config.json."""
    SIMULATED.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def with_template(directory: Path, template: str) -> Tokenization:
    """The simulated tokenizer with another chat template."""
    return Tokenization.from_directory(model_directory(directory, chat_template=template))


def test_templates_have_what_hugging_face_gives_them(tmp_path: Path) -> None:
    """Block trimming, the special tokens, unescaped JSON, the date and loop controls are there."""
    template = (
        "{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ bos_token }}{{ message | tojson }}{{ strftime_now('%%') }}\n{% endfor %}"
    )
    directory = model_directory(tmp_path, chat_template=template, bos_token={"content": "<|start|>"})
    rendered = Tokenization.from_directory(directory).render_chat([{"content": "<é>"}, {"content": "b"}])
    assert rendered == '<|start|>{"content": "<é>"}%\n'


def test_a_malformed_template_is_refused_at_start(tmp_path: Path) -> None:
    """A template that is no Jinja is a ValueError when the directory is read, not at the first request."""
    with pytest.raises(ValueError, match="chat template is malformed"):
        with_template(tmp_path, "{% for message in messages %}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + messages[0]['absent'] }}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
        ("{{ messages[0]['content'] + 1 }}", "does not take these messages"),
        ("{{ 1 / 0 }}", "does not take these messages"),
    ],
)
def test_a_template_that_fails_is_a_value_error(template: str, reason: str, tmp_path: Path) -> None:
    """Refusals, mistakes and attempts to leave the sandbox are all the same error, with the reason."""
    with pytest.raises(ValueError, match=reason):
        with_template(tmp_path, template).render_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_template_takes_prompts_only(tmp_path: Path) -> None:
    """Messages are refused with a hint, text is encoded."""
    tokenization = Tokenization.from_directory(model_directory(tmp_path))
    with pytest.raises(ValueError, match="no chat template; send a prompt"):
        tokenization.render_chat([{"role": "user", "content": "hi"}])
    assert tokenization.encode("a", add_special_tokens=False) == [FIRST_BYTE + ord("a")]


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    """The default of several named templates is used, and the file chat_template.jinja goes first."""
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = model_directory(tmp_path, chat_template=named)
    assert Tokenization.from_directory(directory).render_chat([]) == "yes"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenization.from_directory(directory).render_chat([]) == "file"


def test_end_tokens_and_vocabulary_size_come_from_the_configuration(tmp_path: Path) -> None:
    """generation_config.json goes first, one id or a list; the size is the model's, which may exceed the tokenizer's."""
    directory = model_directory(tmp_path)
    assert Tokenization.from_directory(directory).end_token_ids == ()
    (directory / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 1056}')
    assert Tokenization.from_directory(directory).end_token_ids == (2,)
    assert Tokenization.from_directory(directory).vocabulary_size == 1056
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert Tokenization.from_directory(directory).end_token_ids == (1, 2)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_configuration_is_named(content: str, tmp_path: Path) -> None:
    """A configuration that is not a JSON object is a ValueError with the file's name."""
    (model_directory(tmp_path) / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        Tokenization.from_directory(tmp_path)


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """No tokenizer.json, or one that cannot be read, is a ValueError that names it."""
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenization.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        Tokenization.from_directory(tmp_path)


def test_a_piece_is_a_token_for_people() -> None:
    """Whole characters as they are, other bytes as hexadecimal, special tokens by name, ids without a token as such."""
    tokenization = Tokenization.simulated()
    (tree,) = tokenization.encode(" tree", add_special_tokens=False)
    assert tokenization.piece(tree) == " tree"
    assert tokenization.piece(0) == "<|start|>"
    assert tokenization.piece(3 + 0xE2) == "\\xe2"
    assert tokenization.piece(99_999) == "<99999>"


@pytest.fixture(scope="module")
def default_model() -> Tokenization:
    """The default model's tokenization."""
    return Tokenization.from_directory(resolve(DEFAULT_MODEL, cache_dir=default_cache_dir(), text_only=True))


@pytest.mark.model
def test_the_default_model_reads_its_own_chats(default_model: Tokenization) -> None:
    """A question becomes the ids the model was trained on: ChatML with the default system message, digits alone."""
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
    question = [1, 4093, 198, 35589, 18865, 284, 4617, 30, 2, 198, 1, 520, 9531, 198]
    assert default_model.encode_chat([{"role": "user", "content": "Compare glaciers and Australia."}]) == system + question
    assert default_model.encode("12", add_special_tokens=True) == [33, 34]
    assert (default_model.vocabulary_size, default_model.end_token_ids) == (49152, (2,))


@pytest.mark.model
@given(token_ids=st.lists(st.integers(0, 49151), max_size=40), cuts=cuts, skip=st.booleans())
def test_the_default_model_streams_its_decoding(
    default_model: Tokenization, token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Random ids of the real vocabulary, cut anywhere, give the tokenizer's own decoding."""
    texts = decoded(default_model.decoder(skip), pieces_of(token_ids, cuts))
    assert "".join(texts) == default_model.tokenizer.decode(token_ids, skip_special_tokens=skip)
