"""This file is the ranks of this machine as their parent sees them: started, loaded, told of steps, watched, stopped."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from verify_service.engine import EngineLost, Masks, Unsupported
from verify_service.engines.ranks.messages import Failed, NotFinite, StepMasks, Stop

Plan = TypeVar("Plan")

_STOP_SECONDS = 10.0


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    connection: Connection


class Ranks:
    """The processes of this machine's ranks. One thread calls `load` and `step`; a thread of its own watches over them.

    The death of any rank is the death of all: the others would wait for it. `load` and `step` then raise EngineLost, and
    `on_lost` is called, on the watching thread, even if nobody calls.
    """

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks
        self._talking = threading.Lock()
        self._stopping = False
        self._lost = threading.Event()
        self._on_lost: Callable[[str], None] = _unwatched
        self._reason = ""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    @classmethod
    def start(cls, run: Callable[[Plan, Connection], None], plans: Mapping[int, Plan]) -> Ranks:
        """Start the ranks of these numbers, each in a fresh process that runs `run` with its plan; returns at once."""
        context = multiprocessing.get_context("spawn")
        ranks = []
        for number, plan in plans.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(plan, theirs), name=f"rank-{number}", daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        return cls(ranks)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks of this machine, in order."""
        return tuple(rank.process.pid or 0 for rank in self._ranks)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called with the reason when a rank is lost; at once if one is already."""
        self._on_lost = on_lost
        if self._lost.is_set():
            on_lost(self._reason)

    def load(self) -> Any:
        """Wait until the model is loaded; what rank 0 says of it.

        Raises Unsupported if a rank refuses, EngineLost if one ends.
        """
        said = self._first_said()
        if isinstance(said, Failed):
            self.kill(said.reason)
            if said.is_refusal:
                raise Unsupported(said.reason)
            raise EngineLost(f"rank {said.rank} failed: {said.reason}")
        return said

    def step(self, command: object, masks: Mapping[int, Masks] = MappingProxyType({})) -> Any:
        """Have all ranks compute it; rank 0's answer. The masks of the masked parts, by number, are waited for meanwhile.

        Raises EngineLost if one ends, FloatingPointError if the logits are not finite.
        """
        said = self._answer(command, masks)
        if isinstance(said, NotFinite):
            raise FloatingPointError(said.reason)
        return said

    def ask(self, question: object) -> Any:
        """What the ranks still know of the last step. Raises EngineLost if a rank ends."""
        return self._answer(question)

    def wait(self) -> int:
        """Wait until every rank of this machine has ended; 0 if all were told to stop, else 1. For nodes above 0."""
        for rank in self._ranks:
            rank.process.join()
        return 0 if all(rank.process.exitcode == 0 for rank in self._ranks) else 1

    def stop(self) -> None:
        """End them: by a word to rank 0 if no step is under way, by force if that does not do."""
        self._stopping = True
        if self._ranks[0].number == 0 and self._talking.acquire(timeout=_STOP_SECONDS):
            try:
                self._ranks[0].connection.send(Stop())
            except OSError:
                pass  # it has ended already
            else:
                for rank in self._ranks:
                    rank.process.join(_STOP_SECONDS)
            finally:
                self._talking.release()
        self.kill("stopped")

    def kill(self, reason: str) -> None:
        """End them by force, now."""
        self._stopping = True
        self._reason = self._reason or reason
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _answer(self, said: object, masks: Mapping[int, Masks] = MappingProxyType({})) -> object:
        with self._talking:
            try:
                self._ranks[0].connection.send(said)
                if masks:
                    rows = {number: each.rows() for number, each in masks.items()}
                    self._ranks[0].connection.send(StepMasks(rows))
                answer: object = self._ranks[0].connection.recv()
            except (EOFError, OSError) as error:
                raise self._loss() from error
        if isinstance(answer, Failed):
            raise EngineLost(f"rank {answer.rank} failed: {answer.reason}")
        return answer

    def _first_said(self) -> object:
        """The first word of any rank. Only rank 0 says more than that it failed."""
        while True:
            ready = connection.wait([rank.connection for rank in self._ranks])
            for rank in self._ranks:
                if rank.connection in ready:
                    try:
                        return rank.connection.recv()
                    except (EOFError, OSError) as error:
                        raise self._loss() from error

    def _watch(self) -> None:
        sentinels = {rank.process.sentinel: rank for rank in self._ranks}
        first = connection.wait(list(sentinels))[0]
        if self._stopping:
            return
        rank = sentinels[first]  # type: ignore[index] # these are the sentinels that were waited for
        rank.process.join()
        if rank.process.exitcode == 0:  # told to stop, and on other nodes than the first that is all one hears of it
            self._stopping = True
            return
        self._reason = f"rank {rank.number} ended with exit code {rank.process.exitcode}{_last_words(rank)}"
        self.kill(self._reason)
        self._lost.set()
        self._on_lost(self._reason)

    def _loss(self) -> EngineLost:
        self._lost.wait(_STOP_SECONDS)
        return EngineLost(self._reason or "the ranks were stopped")


def _last_words(rank: _Rank) -> str:
    """What a rank other than 0 said of its end; rank 0's words are for whoever waits for its answer."""
    if rank.number == 0:
        return ""
    try:
        said = rank.connection.recv() if rank.connection.poll() else None
    except (EOFError, OSError):
        return ""
    return f": {said.reason}" if isinstance(said, Failed) else ""


def _unwatched(reason: str) -> None:
    """The callback of ranks that nobody watches."""
