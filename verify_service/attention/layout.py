"""This file is the layout of a step: the rows of several sessions side by side, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PADDING_FACTOR = 1.25
_PADDING_SCORES = 8192  # so many scores of a query with a key take about as long as starting the operations of a group


@dataclass(frozen=True, eq=False)
class Segment:
    """The new rows of one session in a step.

    A row sees the committed prefix and, of the new rows, its ancestors and itself. `context_slots` int64 [context] are
    the prefix's slots in order of position; `slots` int64 [rows] is where the new rows go; `positions` int64 [rows];
    `visible` bool [rows, rows] is None for a chain, where a row sees all new rows before it.
    """

    context_slots: Tensor
    slots: Tensor
    positions: Tensor
    visible: Tensor | None = None

    def __len__(self) -> int:
        """Number of new rows."""
        return len(self.slots)

    @property
    def key_slots(self) -> Tensor:
        """Slots of the prefix, then of the new rows; int64 [context + rows]."""
        return torch.cat((self.context_slots, self.slots))

    @property
    def is_fresh_chain(self) -> bool:
        """True for a chain with no prefix before it: plain causal attention."""
        return self.visible is None and not len(self.context_slots)

    def visibility(self, window: int | None) -> Tensor:
        """What each new row sees, bool [rows, context + rows]; with a window, nothing `window` or more positions back."""
        num_rows, num_context = len(self), len(self.context_slots)
        device = self.slots.device
        own = self.visible
        if own is None:
            own = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
        visible = torch.cat((torch.ones(num_rows, num_context, dtype=torch.bool, device=device), own), dim=1)
        if window is None:
            return visible
        key_positions = torch.cat((torch.arange(num_context, device=device), self.positions))
        return visible & (self.positions[:, None] - key_positions[None, :] < window)


@dataclass(frozen=True, eq=False)
class Group:
    """Segments that attend together, padded to a rectangle of the longest's rows and keys.

    `rows` int64 [segments, rows] are row numbers in the step and `key_slots` int64 [segments, keys] slots; padding repeats
    a segment's own. `real` int64 tells which of the flattened rows are no padding; None if all are.
    """

    segments: tuple[Segment, ...]
    rows: Tensor
    key_slots: Tensor
    real: Tensor | None

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: Sequence[Tensor]) -> Group:
        """Segments with the numbers of their rows in the step."""
        longest = max(len(segment) for segment in segments)
        is_padded = any(len(segment) < longest for segment in segments)
        counts = torch.tensor([len(segment) for segment in segments])
        real = (torch.arange(longest) < counts[:, None]).flatten().nonzero()[:, 0] if is_padded else None
        return cls(
            segments=tuple(segments),
            rows=pad_sequence(rows, longest),
            key_slots=pad_sequence([segment.key_slots for segment in segments], max(map(_num_keys, segments))),
            real=real.to(rows[0].device) if real is not None else None,
        )

    @property
    def is_fresh_chain(self) -> bool:
        """True for one chain with no prefix before it: plain causal attention."""
        return len(self.segments) == 1 and self.segments[0].is_fresh_chain

    @property
    def sees_all(self) -> bool:
        """True if every row sees every key, but for windows."""
        return self.rows.shape[1] == 1 and len({_num_keys(segment) for segment in self.segments}) == 1

    def visibility(self, window: int | None) -> Tensor:
        """What each row sees, bool [segments, rows, keys]; a padding row sees one key, nobody sees a padding key."""
        shape = (len(self.segments), self.rows.shape[1], self.key_slots.shape[1])
        visible = torch.zeros(shape, dtype=torch.bool, device=self.rows.device)
        for number, segment in enumerate(self.segments):
            visible[number, : len(segment), : _num_keys(segment)] = segment.visibility(window)
            visible[number, len(segment) :, 0] = True
        return visible


class StepLayout:
    """The segments of a step, flattened one after the other into one ragged batch of `num_rows` rows.

    `groups` are the segments as they attend; `order` int64 [rows] puts the groups' rows back into the step's order, None if
    they are in it.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.slots = torch.cat([segment.slots for segment in self.segments])
        self.positions = torch.cat([segment.positions for segment in self.segments])
        self.num_rows = len(self.slots)
        self.max_position = int(self.positions.max())
        numbers = torch.split(
            torch.arange(self.num_rows, device=self.slots.device), [len(segment) for segment in self.segments]
        )
        grouped = _grouped(self.segments)
        self.groups = tuple(
            Group.of([self.segments[member] for member in members], [numbers[member] for member in members])
            for members in grouped
        )
        order = [member for members in grouped for member in members]
        in_order = order == sorted(order)
        self.order = None if in_order else torch.cat([numbers[member] for member in order]).argsort()


def pad_sequence(sequences: Sequence[Tensor], length: int) -> Tensor:
    """Sequences [numbers] side by side, [sequences, length], each padded with its own last number."""
    return torch.stack([torch.cat((sequence, sequence[-1:].expand(length - len(sequence)))) for sequence in sequences])


def _num_keys(segment: Segment) -> int:
    return len(segment.context_slots) + len(segment)


def _grouped(segments: Sequence[Segment]) -> list[list[int]]:
    """Numbers of the segments that attend together: of like size, so that little of the rectangle is padding."""
    by_size = sorted(range(len(segments)), key=lambda number: (len(segments[number]), _num_keys(segments[number])))
    groups: list[list[int]] = []
    for number in by_size:
        if groups and _pays(segments, [*groups[-1], number]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return [sorted(members) for members in groups]


def _pays(segments: Sequence[Segment], members: Sequence[int]) -> bool:
    """True if computing the padding costs less than a computation more."""
    sizes = [(len(segments[member]), _num_keys(segments[member])) for member in members]
    rectangle = len(sizes) * max(rows for rows, _ in sizes) * max(keys for _, keys in sizes)
    return rectangle <= _PADDING_FACTOR * sum(rows * keys for rows, keys in sizes) + _PADDING_SCORES
