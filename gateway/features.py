"""This file is a generation's context features on their way from the target to the drafter."""

from __future__ import annotations

import asyncio
from bisect import bisect_right

from treewire.errors import Incompatible, InvalidRequest
from treewire.v1 import tree_pb2


class FeaturesGone(Incompatible):
    """Features that a drafter would need are no longer kept: no drafter can follow this generation from here on."""


class FeatureLog:
    """The features of every committed position, as messages in order of position, kept for the drafter that follows and for
    one that takes its place after a failure.

    The target's side appends and never waits. At most `max_bytes` of tensors are kept: what comes above pushes out the oldest.
    A drafter that keeps up has had those; one that is overtaken, or a new one, finds them gone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: list[tree_pb2.Features] = []
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self.first_position = 0
        self.stop = 0

    def copy(self) -> FeatureLog:
        """A log that goes on by itself from what this one has."""
        copied = FeatureLog(self._max_bytes)
        copied._messages, copied._num_bytes = self._messages.copy(), self._num_bytes
        copied.first_position, copied.stop = self.first_position, self.stop
        return copied

    def append(self, message: tree_pb2.Features) -> None:
        """Keep the next positions' features. Those of a target that starts anew begin at 0; what is known already is skipped.

        Raises InvalidRequest on a gap.
        """
        if message.first_position > self.stop:
            raise InvalidRequest(f"features start at position {message.first_position}, {self.stop} is next")
        stop = message.first_position + num_positions(message)
        if stop <= self.stop:
            return
        self._messages.append(_from(message, self.stop))
        self._num_bytes += len(self._messages[-1].tensor.data)
        self.stop = stop
        while self._num_bytes > self._max_bytes:
            self._drop()
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def after(self, position: int) -> tree_pb2.Features:
        """The features from `position` on, as far as one message goes, as soon as there are any. FeaturesGone if dropped."""
        while position >= self.stop:
            await self._arrived.wait()
        if position < self.first_position:
            raise FeaturesGone(
                f"features from position {position} are asked for, those before {self.first_position} were dropped: "
                f"{self._max_bytes:,} bytes are kept of a generation"
            )
        return _from(self._messages[bisect_right(self._messages, position, key=_stop)], position)

    def _drop(self) -> None:
        dropped = self._messages.pop(0)
        self._num_bytes -= len(dropped.tensor.data)
        self.first_position = _stop(dropped)


def num_positions(message: tree_pb2.Features) -> int:
    """Positions that a message has features of. Raises InvalidRequest if its tensor has no rows of one size."""
    shape = message.tensor.shape
    if len(shape) != 2 or shape[0] < 1 or len(message.tensor.data) % shape[0]:
        raise InvalidRequest(f"features have shape {list(shape)} and {len(message.tensor.data)} bytes, rows are needed")
    return int(shape[0])


def _stop(message: tree_pb2.Features) -> int:
    return message.first_position + num_positions(message)


def _from(message: tree_pb2.Features, position: int) -> tree_pb2.Features:
    """The message without what lies before `position`."""
    num_known = position - message.first_position
    if not num_known:
        return message
    rows, size = message.tensor.shape
    tensor = tree_pb2.Tensor(
        data_type=message.tensor.data_type,
        shape=(rows - num_known, size),
        data=message.tensor.data[num_known * (len(message.tensor.data) // rows) :],
    )
    return tree_pb2.Features(first_position=position, tensor=tensor, last=message.last)
