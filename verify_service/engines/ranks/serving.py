"""This file is a rank from within: how its process begins, hears of commands, and ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

from verify_service.engine import Unsupported
from verify_service.engines.ranks.messages import Failed, Idle, Stop
from verify_service.parent_watch import end_with_parent

IDLE_SECONDS = 5.0
"""How often idle ranks are shown that rank 0 lives."""

LOST_AFTER = timedelta(minutes=10)
"""How long a rank waits for the others: first kernels may compile for minutes."""

_FAILED_EXIT_CODE = 1

_log = logging.getLogger(__name__)


def run(number: int, parent: Connection, serve: Callable[[], None]) -> None:
    """The process of rank `number`, until it is told to stop. Whatever fails is told to the parent and ends the process."""
    end_with_parent()
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s [rank {number}] %(message)s")
    try:
        serve()
    except Unsupported as error:
        _log.error("rank refuses: %s", error)
        _fail(number, parent, str(error), is_refusal=True)
    except Exception as error:  # noqa: BLE001 - told to the parent, and the end of the process
        _log.exception("rank failed")
        _fail(number, parent, f"{type(error).__name__}: {error}", is_refusal=False)


def commands(source: Callable[[], object], number: int, num_ranks: int) -> Iterator[object]:
    """What all ranks hear in the same order, until Stop: rank 0 has it from `source`, the others from rank 0.

    For more than one rank `torch.distributed` must be set up; a gloo group of all ranks carries the words.
    """
    hear = source if num_ranks == 1 else _hearing(source, number)
    while not isinstance(command := hear(), Stop):
        if not isinstance(command, Idle):
            yield command


def said_by(parent: Connection) -> object:
    """The parent's next word, or Idle if it says nothing for a while."""
    return parent.recv() if parent.poll(IDLE_SECONDS) else Idle()


def _hearing(source: Callable[[], object], number: int) -> Callable[[], object]:
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=LOST_AFTER)

    def hear() -> object:
        said = [source() if number == 0 else Idle()]
        dist.broadcast_object_list(said, src=0, group=group)
        return said[0]

    return hear


def _fail(number: int, parent: Connection, reason: str, *, is_refusal: bool) -> None:
    """Tell the parent and end at once: other ranks may wait in a collective for this one, and exit handlers with them."""
    parent.send(Failed(number, reason, is_refusal))
    parent.close()
    os._exit(_FAILED_EXIT_CODE)
