"""This file is the ranks of this machine as their parent sees them: started, loaded, told of steps, watched, stopped."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from verify_service.engine import EngineLost, Masks, Unsupported
from verify_service.engines.sglang.messages import (
    Failed,
    NotFinite,
    Place,
    Question,
    RankPlan,
    Ready,
    StepAnswer,
    StepCommand,
    StepMasks,
    Stop,
)
from verify_service.engines.sglang.options import SglangOptions, server_arguments
from verify_service.engines.sglang.traits import ModelTraits

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
    def start(cls, options: SglangOptions, traits: ModelTraits, num_threads: int | None = None) -> Ranks:
        """Start them all, each in a fresh process; returns at once. Options and model are checked before."""
        context = multiprocessing.get_context("spawn")
        dist_port = _free_port()
        ranks = []
        for number in options.local_ranks:
            ours, theirs = context.Pipe()
            plan = RankPlan(
                place=Place(number, options.base_gpu_id + number - options.local_ranks.start, dist_port),
                num_ranks=options.tp_size,
                arguments=server_arguments(options, traits, dist_port),
                widths=options.widths,
                tap_layers=options.tapped_layers,
                feature_projection=options.feature_projection,
                hidden_size=traits.hidden_size,
                num_layers=traits.num_layers,
                max_sessions=options.max_sessions,
                num_threads=num_threads,
            )
            process = context.Process(target=_run, args=(plan, theirs), name=f"rank-{number}", daemon=True)
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

    def load(self) -> Ready:
        """Wait until the model is loaded. Raises Unsupported if a rank refuses, EngineLost if one ends."""
        said = self._first_said()
        if isinstance(said, Failed):
            self.kill(said.reason)
            if said.is_refusal:
                raise Unsupported(said.reason)
            raise EngineLost(f"rank {said.rank} failed: {said.reason}")
        assert isinstance(said, Ready)
        return said

    def step(self, command: StepCommand, masks: Mapping[int, Masks]) -> StepAnswer:
        """Have all ranks compute it; the masks of the masked parts, by number, are waited for meanwhile.

        Raises EngineLost if a rank ends, FloatingPointError if the logits are not finite.
        """
        said = self._answer(command, masks)
        if isinstance(said, NotFinite):
            raise FloatingPointError(said.reason)
        assert isinstance(said, StepAnswer)
        return said

    def ask(self, question: Question) -> Any:
        """What rank 0 still knows of the last step. Raises EngineLost if a rank ends."""
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

    def _answer(self, said: StepCommand | Question, masks: Mapping[int, Masks] | None = None) -> object:
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


def _run(plan: RankPlan, parent: Connection) -> None:
    """In the new process: what is heavy is imported there alone."""
    from verify_service.engines.sglang.rank import run_rank

    run_rank(plan, parent)


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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
