"""This file is the reader of GGUF model files: metadata, tensor table, and tensors dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is mapped, not read: a tensor costs memory only
while it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]

_T = TypeVar("_T")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING_TYPE = 8
_ARRAY_TYPE = 9


class GgufError(ValueError):
    """The file is no GGUF file, is cut short, or holds something that this reader does not know."""


class Quantisation(NamedTuple):
    """How a tensor type stores numbers: blocks of `block_size` numbers in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    dequantise: Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the table: shape in row-major order, the number of its type, and where its bytes start in the file."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int

    @property
    def type_name(self) -> str:
        """Name of the tensor type, such as Q4_1; also of the types that are not read."""
        return _TYPE_NAMES.get(self.type_number, f"type {self.type_number}")

    @property
    def num_elements(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)


class GgufFile:
    """An open GGUF file. Raises GgufError if it is malformed, OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC):
                raise GgufError(f"{path.name} is empty or cut short")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self._bytes, path.name)
        self.metadata = header.metadata
        self.tensors = header.tensors

    def text(self, key: str) -> str:
        """The metadata string of that key."""
        return self._value(key, str)

    def integer(self, key: str) -> int:
        """The metadata integer of that key."""
        return self._value(key, int)

    def number(self, key: str) -> float:
        """The metadata float32 of that key, as the shortest decimal that names it."""
        return float(str(np.float32(self._value(key, float))))

    def texts(self, key: str) -> list[str]:
        """The metadata list of strings of that key."""
        return [value for value in self._value(key, tuple) if isinstance(value, str)]

    def integers(self, key: str) -> list[int]:
        """The metadata list of integers of that key."""
        return [value for value in self._value(key, tuple) if isinstance(value, int)]

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor of that name, dequantised to float32, of its shape. Raises GgufError if its type is not read."""
        info = self.tensors[name]
        quantisation = QUANTISATIONS.get(info.type_number)
        if quantisation is None:
            raise GgufError(f"tensor {name} of {self.path.name} is {info.type_name}, read are {readable_types()}")
        num_blocks, rest = divmod(info.num_elements, quantisation.block_size)
        end = info.offset + num_blocks * quantisation.block_bytes
        if rest or end > len(self._bytes):
            raise GgufError(
                f"tensor {name} of {self.path.name} has no whole blocks or ends at byte {end} of {len(self._bytes)}"
            )
        raw = np.frombuffer(self._bytes, np.uint8, num_blocks * quantisation.block_bytes, info.offset)
        return quantisation.dequantise(raw.reshape(num_blocks, quantisation.block_bytes)).reshape(info.shape)

    def _value(self, key: str, kind: type[_T]) -> _T:
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise GgufError(f"{self.path.name} has {type(value).__name__} where {key} must be {kind.__name__}")
        return value


class _Header:
    """Reads the header front to back: metadata, then the tensor table."""

    def __init__(self, buffer: mmap.mmap, file_name: str) -> None:
        self._buffer = buffer
        self._file_name = file_name
        self._position = 0
        if self._take(len(_MAGIC)) != _MAGIC:
            raise GgufError(f"{file_name} is no GGUF file: it does not start with {_MAGIC!r}")
        version = self._unsigned("I")
        if version not in _VERSIONS:
            raise GgufError(f"{file_name} is GGUF version {version}, read are {_VERSIONS}")
        num_tensors, num_values = self._unsigned("Q"), self._unsigned("Q")
        self.metadata = dict(self._key_and_value() for _ in range(num_values))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = {info.name: info for info in self._placed(infos)}

    def _take(self, size: int) -> bytes:
        taken = self._buffer[self._position : self._position + size]
        if len(taken) != size:
            raise GgufError(f"{self._file_name} is cut short: {size} bytes wanted at byte {self._position}")
        self._position += size
        return taken

    def _scalars(self, code: str, count: int) -> tuple[Scalar, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self._take(struct.calcsize(f"<{code}") * count))

    def _unsigned(self, code: str) -> int:
        return int(self._scalars(code, 1)[0])

    def _string(self) -> str:
        return self._take(self._unsigned("Q")).decode("utf-8", errors="replace")

    def _key_and_value(self) -> tuple[str, Value]:
        return self._string(), self._value(self._unsigned("I"))

    def _value(self, type_number: int) -> Value:
        if type_number != _ARRAY_TYPE:
            return self._elements(type_number, 1)[0]
        return self._elements(self._unsigned("I"), self._unsigned("Q"))

    def _elements(self, type_number: int, count: int) -> tuple[Scalar, ...]:
        if type_number == _STRING_TYPE:
            return tuple(self._string() for _ in range(count))
        if type_number not in _SCALAR_FORMATS:
            raise GgufError(f"{self._file_name} has metadata of the unknown type {type_number}")
        return self._scalars(_SCALAR_FORMATS[type_number], count)

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        shape = tuple(self._unsigned("Q") for _ in range(self._unsigned("I")))
        return TensorInfo(name, shape[::-1], self._unsigned("I"), self._unsigned("Q"))

    def _placed(self, infos: list[TensorInfo]) -> Iterator[TensorInfo]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{self._file_name} has the alignment {alignment!r}, it must be a positive integer")
        start = -(-self._position // alignment) * alignment
        for info in infos:
            yield TensorInfo(info.name, info.shape, info.type_number, start + info.offset)


def readable_types() -> str:
    """Names of the tensor types that can be read, for messages."""
    return ", ".join(quantisation.name for quantisation in QUANTISATIONS.values())


def _halves(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The float16 at byte `start` of every block: [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
    """The 16 bytes from `start` of every block as 32 numbers, all low halves first: [blocks, 32]."""
    packed = blocks[:, start : start + 16]
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.copy().view(np.float32)


def _f16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _halves(blocks, 0)


def _q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _halves(blocks, 0) * (_nibbles(blocks, 2).astype(np.float32) - np.float32(8))


def _q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _halves(blocks, 0) * _nibbles(blocks, 4).astype(np.float32) + _halves(blocks, 2)


def _q5_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    fifth_bits = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _halves(blocks, 0) * ((_nibbles(blocks, 6) | (fifth_bits << 4)).astype(np.float32) - np.float32(16))


def _q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _halves(blocks, 0) * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


QUANTISATIONS = {
    0: Quantisation("F32", 1, 4, _f32),
    1: Quantisation("F16", 1, 2, _f16),
    2: Quantisation("Q4_0", 32, 18, _q4_0),
    3: Quantisation("Q4_1", 32, 20, _q4_1),
    6: Quantisation("Q5_0", 32, 22, _q5_0),
    8: Quantisation("Q8_0", 32, 34, _q8_0),
}

_UNREAD_TYPE_NAMES = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
_TYPE_NAMES = _UNREAD_TYPE_NAMES | {number: quantisation.name for number, quantisation in QUANTISATIONS.items()}
