"""This file is how the ranks of a model add up and bring together what each of them computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verify_service.engines.transformers.shard import Shard


class Group(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order, with tensors of the same shapes."""

    def sum(self, rows: Tensor) -> Tensor:
        """The ranks' rows added up, on every rank, the same bits on each. May overwrite `rows`."""

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Each rank's rows, in order of rank, on rank 0; nothing on the others."""


class Alone:
    """A group of one."""

    def sum(self, rows: Tensor) -> Tensor:
        """The rows."""
        return rows

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows."""
        return [rows]


class DistributedGroup:
    """The ranks of `torch.distributed`'s default group, over gloo on CPUs and NCCL on GPUs."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def sum(self, rows: Tensor) -> Tensor:
        """One all-reduce."""
        rows = rows.contiguous()
        dist.all_reduce(rows)
        return rows

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """One gather to rank 0."""
        rows = rows.contiguous()
        gathered = [torch.empty_like(rows) for _ in range(self._shard.size)] if self._shard.is_first else None
        dist.gather(rows, gathered, dst=0)
        return gathered or ()
