"""This file is what an output took where a structure left few tokens to choose from: it will often take the same again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_NUM_KEPT = 256


class Habits:
    """The tokens that were taken lately, by what was allowed there: of as many different sets as are kept, the latest."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._taken: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._taken)

    def learn(self, allowed: Sequence[int], token_id: int) -> None:
        """Of these few tokens, lowest first, this one was taken."""
        key = tuple(allowed)
        self._taken[key] = token_id
        self._taken.move_to_end(key)
        if len(self._taken) > self._num_kept:
            self._taken.popitem(last=False)

    def likeliest_first(self, allowed: Sequence[int]) -> list[int]:
        """The tokens with the one in front that was taken when they, lowest first, were last allowed."""
        known = self._taken.get(tuple(allowed))
        return list(allowed) if known is None else [known, *(token_id for token_id in allowed if token_id != known)]
