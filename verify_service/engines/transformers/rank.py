"""This file is one rank of the target: a process that holds its share of the model and computes the steps told to all."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from treewire.kv.pages import PagedKv
from treewire.kv.store import KvStore
from verify_service.attention.tree_attention import TreeAttention
from verify_service.engine import RankMemory
from verify_service.engines.features import FeatureTaps
from verify_service.engines.ranks import serving
from verify_service.engines.ranks.interfaces import interface_towards
from verify_service.engines.ranks.messages import NotFinite
from verify_service.engines.ranks.questions import Question
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.checkpoint import Checkpoint
from verify_service.engines.transformers.group import DistributedGroup
from verify_service.engines.transformers.lean import PRECISIONS, LeanForward
from verify_service.engines.transformers.runner import LocalRunner, Runner
from verify_service.engines.transformers.selection import longest_context
from verify_service.engines.transformers.shard import Shard
from verify_service.engines.transformers.sharded import ShardedRows
from verify_service.engines.transformers.static_step import StaticRunner
from verify_service.engines.transformers.tensor_parallel import (
    StepAnswer,
    StepCommand,
    TensorParallelOptions,
    TensorParallelPlan,
    TensorParallelReady,
    rank_memory,
)

_LOOPBACK = "lo"


def run_rank(plan: TensorParallelPlan, parent: Connection) -> None:
    """The process of one rank, until it is told to stop."""
    serving.run(plan.rank, parent, partial(_serve, plan, parent))


def _serve(plan: TensorParallelPlan, parent: Connection) -> None:
    options = plan.options
    torch.set_num_threads(options.num_threads or max(1, (os.cpu_count() or 1) // len(options.local_ranks)))
    _join(plan)
    rank = _Rank(plan)
    memory = _memory_of_all(plan, rank.weight_bytes)
    is_first = plan.rank == 0
    if is_first:
        parent.send(TensorParallelReady(memory))
    for command in serving.commands(partial(serving.said_by, parent), plan.rank, options.tp_size):
        answer = rank.answer(command)
        if is_first:
            parent.send(answer)


def _join(plan: TensorParallelPlan) -> None:
    """Meet the other ranks. Those of one machine speak over loopback alone."""
    options = plan.options
    interface = interface_towards(options.dist_init_addr) if options.nnodes > 1 else _LOOPBACK
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if plan.device != "cpu":
        torch.cuda.set_device(plan.device)
    dist.init_process_group(
        "gloo" if plan.device == "cpu" else "nccl",
        init_method=plan.meeting,
        rank=plan.rank,
        world_size=options.tp_size,
        timeout=serving.LOST_AFTER,
    )


def _memory_of_all(plan: TensorParallelPlan, weight_bytes: int) -> tuple[RankMemory, ...]:
    """What each rank holds, on every rank."""
    own = rank_memory(plan.options, _architecture(plan), plan.rank, weight_bytes)
    all_ranks = [own] * plan.options.tp_size
    dist.all_gather_object(all_ranks, own)
    return tuple(all_ranks)


def _architecture(plan: TensorParallelPlan) -> Architecture:
    return Architecture.from_config(Checkpoint(plan.options.model_path).config)


class _Rank:
    """The share of the model, and what it answers to commands."""

    def __init__(self, plan: TensorParallelPlan) -> None:
        options, architecture = plan.options, _architecture(plan)
        shard = Shard(plan.rank, options.tp_size)
        group = DistributedGroup(shard)
        forward = LeanForward(
            architecture,
            Checkpoint(options.model_path),
            PRECISIONS[options.dtype],
            TreeAttention(KvStore(PagedKv(options.kv_tokens, options.kv_page_size).num_slots + 1)),  # one fills buckets
            plan.device,
            _taps(plan, architecture),
            shard,
            group,
        )
        self.weight_bytes = forward.weight_bytes
        self._chooser = ShardedRows(architecture.vocabulary_size, shard, group)
        self._runner = _runner(forward, self._chooser, options, architecture)

    def answer(self, command: object) -> object:
        """Rank 0's is for the parent."""
        if isinstance(command, Question):
            return self._chooser.answer(command)
        assert isinstance(command, StepCommand)
        for session in command.forgotten:
            self._runner.forget(session)
        for moves in command.moves:
            self._runner.move(moves)
        return self._step(command)

    def _step(self, command: StepCommand) -> StepAnswer | NotFinite:
        try:
            posteriors = self._runner.step(command.parts)
        except FloatingPointError as error:
            return NotFinite(str(error))
        told = tuple(replace(posterior, distributions=None) for posterior in posteriors)
        return StepAnswer(told, self._runner.num_missed_graphs)


def _runner(forward: LeanForward, chooser: ShardedRows, options: TensorParallelOptions, architecture: Architecture) -> Runner:
    if not options.uses_graphs:
        return LocalRunner(forward, chooser)
    longest = longest_context([architecture.max_context], options.max_context)
    return StaticRunner(forward, chooser, max_nodes=options.max_tree_nodes, max_context=longest)


def _taps(plan: TensorParallelPlan, architecture: Architecture) -> FeatureTaps | None:
    """Features are made on rank 0: what is tapped is the same on all ranks."""
    checkpoint = plan.options.feature_projection
    if checkpoint is None or plan.rank:
        return None
    return FeatureTaps.load(
        checkpoint,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        device=torch.device(plan.device),
    )
