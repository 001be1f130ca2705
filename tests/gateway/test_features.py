"""The log of a generation's features: in order, bounded, and never in the target's way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gateway.features import FeatureLog, FeaturesGone
from treewire import wire
from treewire.errors import InvalidRequest
from treewire.v1 import tree_pb2

SIZE = 4
ROW_BYTES = 4 * SIZE


def message(first_position: int, count: int) -> tree_pb2.Features:
    """Features of consecutive positions, each row filled with its position."""
    rows = np.repeat(np.arange(first_position, first_position + count, dtype=np.float32)[:, np.newaxis], SIZE, axis=1)
    (made,) = wire.features_to_messages(rows, first_position, last=True)
    return made


def positions(features: tree_pb2.Features) -> list[int]:
    """The positions that a message is of, read from its rows."""
    rows = wire.tensor_from_message(features.tensor, field="features")
    assert features.first_position == rows[0, 0]
    return [int(row[0]) for row in rows]


async def test_reader_gets_every_position_once() -> None:
    """From wherever it stands, also from within a message."""
    log = FeatureLog(max_bytes=1000)
    for first, count in ((0, 3), (3, 1), (4, 2)):
        log.append(message(first, count))
    assert positions(await log.after(0)) == [0, 1, 2]
    assert positions(await log.after(2)) == [2]
    assert positions(await log.after(3)) == [3]
    assert positions(await log.after(4)) == [4, 5]


async def test_reader_waits_for_what_is_not_there_yet() -> None:
    """It gets the features as soon as they come."""
    log = FeatureLog(max_bytes=1000)
    waiting = asyncio.create_task(log.after(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append(message(0, 2))
    assert positions(await waiting) == [0, 1]


async def test_target_that_starts_anew_changes_nothing() -> None:
    """After a failover the features of the committed prefix come again: what is known is skipped, what is new is kept."""
    log = FeatureLog(max_bytes=1000)
    log.append(message(0, 3))
    log.append(message(0, 2))
    log.append(message(2, 4))
    assert log.stop == 6
    assert positions(await log.after(3)) == [3, 4, 5]


async def test_memory_is_bounded_and_the_overtaken_are_told() -> None:
    """Only the newest features are kept; a reader further back can never catch up."""
    log = FeatureLog(max_bytes=5 * ROW_BYTES)
    for first in range(0, 20, 2):
        log.append(message(first, 2))
    assert log.first_position == 16
    assert positions(await log.after(17)) == [17]
    with pytest.raises(FeaturesGone, match="from position 0 .* before 16 were dropped: 80 bytes"):
        await log.after(0)


async def test_gap_is_refused() -> None:
    """Features that leave out a position are a fault of the sender."""
    log = FeatureLog(max_bytes=1000)
    log.append(message(0, 2))
    with pytest.raises(InvalidRequest, match="start at position 3, 2 is next"):
        log.append(message(3, 1))


@pytest.mark.parametrize("num_positions", [1, 113, 4000])
@pytest.mark.parametrize("size", [64, 576, 4096, 7168])
def test_messages_are_below_one_mebibyte(num_positions: int, size: int) -> None:
    """Cut into messages and put together again, features are what they were; no message is large; one is marked last."""
    features = np.arange(num_positions * size, dtype=np.float32).reshape(num_positions, size)
    messages = wire.features_to_messages(features, 10, last=True)
    assert max(each.ByteSize() for each in messages) < 2**20
    assert [each.last for each in messages] == [False] * (len(messages) - 1) + [True]
    position, parts = 10, []
    for each in messages:
        parts.append(wire.features_from_message(each, first_position=position, feature_size=size))
        position += len(parts[-1])
    np.testing.assert_array_equal(np.concatenate(parts), features)
