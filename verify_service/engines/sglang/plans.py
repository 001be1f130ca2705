"""This file is what each rank of SGLang on this machine is started with."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

from verify_service.engines.sglang.messages import Place, RankPlan
from verify_service.engines.sglang.options import SglangOptions, server_arguments
from verify_service.engines.sglang.traits import ModelTraits


def rank_plans(options: SglangOptions, traits: ModelTraits, num_threads: int | None = None) -> dict[int, RankPlan]:
    """The plan of each rank of this machine, by its number. Options and model are checked before."""
    dist_port = _free_port()
    arguments = server_arguments(options, traits, dist_port)
    return {
        number: RankPlan(
            place=Place(number, options.base_gpu_id + number - options.local_ranks.start, dist_port),
            num_ranks=options.tp_size,
            arguments=arguments,
            widths=options.widths,
            tap_layers=options.tapped_layers,
            feature_projection=options.feature_projection,
            hidden_size=traits.hidden_size,
            num_layers=traits.num_layers,
            max_sessions=options.max_sessions,
            num_threads=num_threads,
        )
        for number in options.local_ranks
    }


def run_plan(plan: RankPlan, parent: Connection) -> None:
    """In the new process: what is heavy is imported there alone."""
    from verify_service.engines.sglang.rank import run_rank

    run_rank(plan, parent)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
