"""This file is the acceptance walk on the device: `treewire.core.acceptance.accept` for a batch of trees, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treewire.core.acceptance import Acceptance

_NONE = -1
_NUM_SCALARS = 2  # number of accepted nodes, bonus token


class Walk(NamedTuple):
    """Of each tree the accepted nodes, root first, then -1 [sessions, nodes]; how many; the bonus token. All int64."""

    path: Tensor
    lengths: Tensor
    bonus: Tensor

    def packed(self) -> Tensor:
        """All of it as one row of numbers a session, int64 [sessions, nodes + 2]."""
        return torch.cat((self.path, self.lengths[:, None], self.bonus[:, None]), dim=1)

    @staticmethod
    def acceptance(row: Sequence[int]) -> Acceptance:
        """What a packed row says, on the host."""
        length, bonus = row[-_NUM_SCALARS:]
        return Acceptance(tuple(row[:length]), bonus)


class Trees(NamedTuple):
    """Trees side by side, padded to one number of nodes: int64 [sessions, nodes] tokens, parents (a root's is itself) and
    depths; bool [sessions, nodes, nodes] what each node sees, itself and its ancestors; int64 [sessions] real nodes, first."""

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    counts: Tensor


def walk(trees: Trees, chosen: Tensor) -> Walk:
    """Follow the choices `chosen` int64 [sessions, nodes] from each root for as long as its tree contains them.

    A node follows its parent if it has the token chosen there, and is the first such child. The accepted nodes are those that
    follow with all of their ancestors: a path, in the order of their numbers. The operations depend on the shape alone.
    """
    num_nodes = chosen.shape[1]
    numbers = torch.arange(num_nodes, device=chosen.device).expand_as(chosen)
    is_real = numbers < trees.counts[:, None]
    agrees = (chosen.gather(1, trees.parents) == trees.token_ids) & is_real & (numbers > 0)
    candidates = numbers.masked_fill(~agrees, num_nodes)
    nearest = torch.full_like(chosen, num_nodes).scatter_reduce_(1, trees.parents, candidates, "amin")
    follows = (nearest.gather(1, trees.parents) == numbers) | (numbers == 0)
    accepted = (follows[:, None] | ~trees.visible).all(dim=-1)
    last = numbers.masked_fill(~accepted, 0).amax(dim=-1, keepdim=True)
    places = trees.depths.masked_fill(~accepted, num_nodes)
    path = chosen.new_full((len(chosen), num_nodes + 1), _NONE).scatter_(1, places, numbers)[:, :num_nodes]
    return Walk(path, accepted.sum(dim=-1), chosen.gather(1, last)[:, 0])
