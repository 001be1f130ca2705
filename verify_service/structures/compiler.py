"""This file is the process that compiles structures: whatever a caller sends, it can be given up and its memory is bounded."""

from __future__ import annotations

import re
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from treewire.core.structure import Structure
from verify_service.parent_watch import end_with_parent

_START_SECONDS = 180.0  # xgrammar imports torch and transformers, which takes long on a busy machine
_TRIAL_TOKENS = 48
_LONGEST_FILL_SECONDS = 0.2
_PLACE_IN_SOURCE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")


class BadStructure(ValueError):
    """A structure that cannot be compiled, or not within the limits. The message says why."""


@dataclass(frozen=True)
class StructureLimits:
    """What a structure may cost: its text in characters, its compilation in seconds and bytes of memory, and the result in
    bytes; and how long one step waits for what it allows, in seconds."""

    max_characters: int = 65_536
    compile_seconds: float = 5.0
    compile_bytes: int = 2 << 30
    max_compiled_bytes: int = 16 << 20
    mask_seconds: float = 2.0


@dataclass(frozen=True)
class Vocabulary:
    """What tokens spell: `token_bytes` of each id that text is made of; special tokens have none. `end_token_ids` end it."""

    token_bytes: Mapping[int, bytes]
    size: int
    end_token_ids: tuple[int, ...]

    def info(self) -> Any:
        """xgrammar's TokenizerInfo. Imports it, with torch and transformers behind it."""
        import xgrammar

        encoded = [self.token_bytes.get(token_id, b"") for token_id in range(self.size)]
        return xgrammar.TokenizerInfo(
            encoded, xgrammar.VocabType.RAW, vocab_size=self.size, stop_token_ids=list(self.end_token_ids)
        )


class Compiler:
    """Compiles in a process of its own, which starts when it is first needed. One call at a time, from any thread."""

    def __init__(self, vocabulary: Vocabulary, limits: StructureLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._calling = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def compile(self, structure: Structure) -> str:
        """The compiled structure, serialised. Raises BadStructure."""
        with self._calling:
            said = self._answer(structure)
        if isinstance(said, BadStructure):
            raise said
        if len(said) > self._limits.max_compiled_bytes:
            raise BadStructure(
                f"compiled it is {len(said):,} bytes large, at most {self._limits.max_compiled_bytes:,} are taken"
            )
        return said

    def stop(self) -> None:
        """End the process, by force."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()

    def _answer(self, structure: Structure) -> str | BadStructure:
        talk = self._started()
        try:
            talk.send(structure)
            if talk.poll(self._limits.compile_seconds):
                answer: str | BadStructure = talk.recv()
                return answer
            reason = f"it was not compiled within {self._limits.compile_seconds:g} s"
        except (EOFError, OSError):
            reason = f"compiling it took more than {self._limits.compile_bytes >> 20:,} MiB of memory, or ended the compiler"
        self.stop()
        return BadStructure(reason)

    def _started(self) -> Connection:
        if self._process is not None and self._connection is not None and self._process.is_alive():
            return self._connection
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._vocabulary, self._limits)
        self._process = context.Process(target=run_compiler, args=arguments, name="structures", daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(_START_SECONDS) or self._connection.recv() != _READY:
            self.stop()
            raise RuntimeError(f"the compiler of structures did not start within {_START_SECONDS:g} s")
        return self._connection


_READY = "ready"


def run_compiler(talk: Connection, vocabulary: Vocabulary, limits: StructureLimits) -> None:
    """The process: structures in, compiled ones or refusals out, until the other end is closed or the parent ends."""
    end_with_parent()
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary.info(), max_threads=1, cache_enabled=False)
    _limit_memory(limits.compile_bytes)
    talk.send(_READY)
    with suppress(EOFError):
        while True:
            structure: Structure = talk.recv()
            try:
                talk.send(_compiled(compiler, structure, vocabulary))
            except BadStructure as error:
                talk.send(error)
            except (RuntimeError, ValueError, MemoryError) as error:  # what xgrammar raises of a text that it does not take
                talk.send(BadStructure(_reason(error)))


def _compiled(compiler: Any, structure: Structure, vocabulary: Vocabulary) -> str:
    compilers: Mapping[str, Callable[[str], Any]] = {
        "json_schema": lambda text: compiler.compile_json_schema(text, any_whitespace=False),
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
    }
    compiled = compilers[structure.kind](structure.text)
    _try(compiled, vocabulary)
    return str(compiled.serialize_json())


def _try(compiled: Any, vocabulary: Vocabulary) -> None:
    """Follow some output through it. Raises BadStructure if what may come next takes too long to find, or is nothing."""
    import random
    import time

    import numpy as np
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(vocabulary.end_token_ids))
    row = np.zeros((1, -(-vocabulary.size // 32)), np.int32)
    rng = random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        started = time.monotonic()
        matcher.fill_next_token_bitmask(row, 0)
        seconds = time.monotonic() - started
        if seconds > _LONGEST_FILL_SECONDS:
            raise BadStructure(f"what may come next takes {seconds:.1f} s to find, at most {_LONGEST_FILL_SECONDS} s are taken")
        allowed: Sequence[int] = np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little")).tolist()
        if not allowed:
            raise BadStructure("no token can begin or continue a text that matches it")
        if not matcher.accept_token(rng.choice(allowed)) or matcher.is_terminated():
            return


def _reason(error: Exception) -> str:
    """xgrammar's message without its place in xgrammar's source; the first line says it."""
    return _PLACE_IN_SOURCE.sub("", str(error).strip()).split("\n")[0] or type(error).__name__


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
