"""This file is the vocabulary that all services of one target share: its tokenizer, its hash, and the simulated one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain, count, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIMULATED_SPECIAL_TOKENS = ("<|start|>", "<|turn|>", "<|end|>")
SIMULATED_END_TOKEN_ID = SIMULATED_SPECIAL_TOKENS.index("<|end|>")
WORD_BOUNDARY = "\N{LOWER ONE EIGHTH BLOCK}"
"""What tokenizers that are not byte-level write for a space."""
_NUM_BYTES = 256
SMALLEST_SIMULATED_VOCABULARY = len(SIMULATED_SPECIAL_TOKENS) + _NUM_BYTES

_COMMON_WORDS = (
    "the of and to in is that it was for on are as with they be at one have this from or had by hot word but what some we can "
    "out other were all there when up use your how said an each she which do their time if will way about many then them write "
    "would like so these her long make thing see him two has look more day could go come did number sound no most people my "
    "over know water than call first who may down side been now find any new work part take get place made live where after "
    "back little only round man year came show every good me give our under name very through just form sentence great think "
    "say help low line differ turn cause much mean before move right boy old too same tell does set three want air well also "
    "play small end put home read hand port large spell add even land here must big high such follow act why ask men change "
    "tree branch root leaf draft target token guess check accept round path node depth budget commit stream model engine"
)
_CJK = "日本語中文漢字言葉木枝根葉推測検証速度草案模型確率世界人大小上下左右山川水火土金月今日明時間東京北京서울한국어나무"
_EMOJI_AND_ACCENTS = "🌳 🌲 🌴 😀 😂 🚀 🔥 ✨ ❤️ 👍🏽 👩‍💻 👨‍👩‍👧 🇯🇵 🏳️‍🌈 🎉 🤖 ✅ é ñ ü ß Ж"
_SYLLABLES = tuple(onset + vowel for onset in "bdfgklmnprstvz" for vowel in "aeiou")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory in the Hugging Face layout. Raises ValueError if it has none that can be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """SHA-256, in hexadecimal, of every (id, token) in the order of ids: equal on two sides if ids mean the same to both."""
    entries = sorted((token_id, token) for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(entries, separators=(",", ":")).encode("ascii")).hexdigest()


def simulated_tokenizer(vocabulary_size: int) -> Tokenizer:
    """The tokenizer of the simulated engines: special tokens, the 256 bytes, then whole pieces of text up to the size.

    Byte-level, so any text can be encoded and any ids decoded. Raises ValueError if the size has no room for the bytes.
    """
    if vocabulary_size < SMALLEST_SIMULATED_VOCABULARY:
        raise ValueError(f"vocabulary size is {vocabulary_size}, the simulated one is at least {SMALLEST_SIMULATED_VOCABULARY}")
    pieces = dict.fromkeys((*SIMULATED_SPECIAL_TOKENS, *byte_characters()))
    for piece in _pieces():
        if len(pieces) == vocabulary_size:
            break
        pieces[piece] = None
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SIMULATED_SPECIAL_TOKENS])
    return tokenizer


def _pieces() -> Iterator[str]:
    """Pieces of text in byte characters, without end: words, then made-up words of more and more syllables."""
    characters = byte_characters()
    words = (variant for word in _COMMON_WORDS.split() for variant in (f" {word}", word, f" {word.capitalize()}"))
    made_up = (" " + "".join(syllables) for length in count(2) for syllables in product(_SYLLABLES, repeat=length))
    for piece in chain(_EMOJI_AND_ACCENTS.split(), _CJK, words, made_up):
        yield "".join(characters[byte] for byte in piece.encode("utf-8"))


def token_bytes(tokenizer: Tokenizer) -> Mapping[int, bytes] | None:
    """The bytes of every id, those of special tokens' names included; None if the tokenizer is not byte-level."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: _bytes_of(token, byte_of) for token, token_id in vocabulary.items()}


def spelled_bytes(tokenizer: Tokenizer) -> Mapping[int, bytes]:
    """What every token that is not special adds to a text, in bytes. Raises ValueError if its tokens are no strings of bytes.

    Taken are byte-level tokenizers and those with byte fallback; of the latter's first token a space before it counts.
    """
    special_ids = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    spelled = token_bytes(tokenizer)
    if spelled is None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        bytes_of_names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(_NUM_BYTES)}
        if not bytes_of_names.keys() <= vocabulary.keys():
            raise ValueError("the target's tokenizer is neither byte-level nor has it byte fallback")
        spelled = {
            token_id: bytes_of_names.get(token) or token.replace(WORD_BOUNDARY, " ").encode("utf-8")
            for token, token_id in vocabulary.items()
        }
    return {token_id: text for token_id, text in spelled.items() if token_id not in special_ids}


def _bytes_of(token: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes a token stands for; one with a character that stands for no byte was added as plain text."""
    if any(character not in byte_of for character in token):
        return token.encode("utf-8")
    return bytes(byte_of[character] for character in token)


def byte_characters() -> tuple[str, ...]:
    """The printable character that byte-level tokenizers write for each byte, 0 to 255 (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = {byte: chr(_NUM_BYTES + rank) for rank, byte in enumerate(sorted(set(range(_NUM_BYTES)) - set(printable)))}
    return tuple(stand_ins.get(byte, chr(byte)) for byte in range(_NUM_BYTES))
