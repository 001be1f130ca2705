"""This file is the structures of one target: compiled once, kept for a while, followed by any number of sessions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treewire.core.structure import Structure
from treewire.core.tree import DraftTree
from treewire.errors import InvalidRequest, Unsupported
from treewire.vocabulary import spelled_bytes
from verify_service.engine import Target
from verify_service.structures.compiler import BadStructure, Compiler, StructureLimits, Vocabulary
from verify_service.structures.matching import Match, PendingMasks, pending
from verify_service.structures.pruning import Pruning

_NUM_KEPT = 64
_NUM_THREADS = 4
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class SessionMasks:
    """`verify_service.engine.Masks` of one step of a session."""

    pending: PendingMasks
    structure: Structure

    def rows(self) -> NDArray[np.int32]:
        """What may follow, int32 [choices, words]. Waits."""
        return self.pending.rows()

    def check(self) -> None:
        """Raises InvalidRequest if they were not found, whereupon the step went on without the session."""
        if self.pending.failure is not None:
            raise refusal(self.structure, self.pending.failure)


@dataclass(frozen=True)
class Matching:
    """One session's structure: pruning and masks, computed beside the loop and beside the target's forward."""

    structure: Structure
    match: Match
    limits: StructureLimits
    threads: ThreadPoolExecutor

    async def pruned(self, tree: DraftTree, deepest: int) -> Pruning:
        """What the structure leaves of a tree and grafts on it, not below `deepest`. InvalidRequest if not found in time."""
        return await self._beside(lambda: self.match.pruned(tree, deepest))

    async def advance(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these tokens. Raises InvalidRequest if they do not fit."""
        await self._beside(lambda: self.match.advance(token_ids))

    def masks(self, tree: DraftTree | None) -> SessionMasks:
        """What may follow each node of a pruned tree, or the output if there is none; being found from now on."""
        return SessionMasks(pending(self.match, tree, self.threads, self.limits.mask_seconds), self.structure)

    async def _beside(self, work: Callable[[], _Value]) -> _Value:
        try:
            async with asyncio.timeout(self.limits.mask_seconds):
                return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        except TimeoutError as error:
            raise self._refused(f"following the output took more than {self.limits.mask_seconds:g} s") from error
        except ValueError as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> InvalidRequest:
        return refusal(self.structure, reason)


class Grammars:
    """Makes matchings of structures. `tokenizer` reads the target's; it raises ValueError where there is none to be read.

    Refusals are kept as well as what was compiled: the same text is not tried twice.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], target: Callable[[], Target], limits: StructureLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._target = target
        self._limits = limits or StructureLimits()
        self._kept: OrderedDict[Structure, Any] = OrderedDict()
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures-compile")
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="structures")

    async def matching(self, structure: Structure, output: Sequence[int]) -> Matching:
        """The structure, followed by an output that has begun with these tokens.

        Raises InvalidRequest with field and reason for a structure that is not taken or an output that does not match,
        Unsupported if this service holds nothing to a structure.
        """
        if len(structure.text) > self._limits.max_characters:
            raise refusal(
                structure, f"it is {len(structure.text):,} characters long, at most {self._limits.max_characters:,} are taken"
            )
        compiled = self._kept.get(structure)
        if compiled is None:
            compiled = await asyncio.get_running_loop().run_in_executor(self._compiling, self._compiled, structure)
        self._keep(structure, compiled)
        if isinstance(compiled, BadStructure):
            raise refusal(structure, str(compiled))
        target = self._target()
        match = Match(self._matcher(compiled), target.vocabulary_size, target.end_token_ids)
        matching = Matching(structure, match, self._limits, self._threads)
        await matching.advance(output)
        return matching

    def close(self) -> None:
        """End the compiler's process, if it runs."""
        if "_compiler" in self.__dict__:
            self._compiler.stop()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, structure: Structure) -> Any:
        """The compiled structure, or the BadStructure that it is."""
        if structure in self._kept:
            return self._kept[structure]
        info = self._info
        import xgrammar

        try:
            return xgrammar.CompiledGrammar.deserialize_json(self._compiler.compile(structure), info)
        except BadStructure as error:
            return error

    def _keep(self, structure: Structure, compiled: Any) -> None:
        self._kept[structure] = compiled
        self._kept.move_to_end(structure)
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)

    def _matcher(self, compiled: Any) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(self._target().end_token_ids))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        target = self._target()
        if not target.end_token_ids:
            raise Unsupported("this target has no token that ends an output: nothing could end one that matches a structure")
        try:
            token_bytes = spelled_bytes(self._tokenizer())
        except ValueError as error:
            raise Unsupported(f"this service holds no output to a structure: {error}") from error
        return Vocabulary(token_bytes, target.vocabulary_size, target.end_token_ids)

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._vocabulary, self._limits)

    @cached_property
    def _info(self) -> Any:
        try:
            return self._vocabulary.info()
        except ImportError as error:
            raise Unsupported(f"structures need the package xgrammar, which cannot be imported here: {error}") from error


def refusal(structure: Structure, reason: str) -> InvalidRequest:
    """The refusal of a structure: the field, and what is wrong with it."""
    return InvalidRequest(f"{structure.kind}: {reason}", metadata={"field": structure.kind})
