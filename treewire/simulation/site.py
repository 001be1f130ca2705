"""This file is what is simulated: the prices of steps, the network between the services, and the limits of each."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from treewire.core.budget import PriceTable, StepPrice
from treewire.simulation.hardware import BLOCK_SIZE, DRAFTER_PARAMETERS, GPUS, MODELS, BlockDrafter, Roofline, Weights
from treewire.simulation.recording import MeasuredMachine

MACHINE = "machine"
_GPU_SITE = re.compile(r"(?P<model>[\w.-]+)@(?:(?P<count>[1-9]\d?)x)?(?P<gpu>\w+)(?::(?P<weights>bf16|fp8))?")
_MAX_GPUS = 16
_TABLE_BATCH_SIZE = 8192
GPU_GATEWAY_SECONDS = 0.0002
"""Assumed: what the gateway does for one message, where no machine was measured."""


class StepSeconds(Protocol):
    """What an engine's step takes."""

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Seconds over so many new positions of so many sessions together."""


class TableSeconds:
    """Steps as measured, by the mean number of positions of a session; every answer is kept, since loads repeat themselves."""

    def __init__(self, table: PriceTable) -> None:
        self.table = table
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Seconds over so many new positions of so many sessions together; between whole means, a straight line."""
        known = self._known.get((num_tokens, batch_size))
        if known is None:
            whole, rest = divmod(num_tokens, batch_size)
            below, above = (self.table.seconds(max(1, nodes), batch_size) for nodes in (whole, whole + 1))
            known = self._known[num_tokens, batch_size] = below + (above - below) * rest / batch_size
        return known


@dataclass(frozen=True)
class Limits:
    """What one step takes, as in the settings of the services: sessions of a replica and of a step, positions of a target's
    step, positions of a prompt's chunk."""

    max_sessions: int = 256
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = 128
    max_draft_batch_size: int = 64


@dataclass(frozen=True)
class Network:
    """Seconds that a message is under way, one way, to the target's and to the drafter's side, and bytes a second of each link.

    Every replica of the gateway has one link to each side, of which both directions are used at once.
    """

    verify_seconds: float
    draft_seconds: float
    bytes_per_second: float = math.inf


@dataclass(frozen=True)
class Site:
    """Where a stack runs: prices, network, limits, replicas. `prices` is what the target publishes to the gateway.

    Raises ValueError on fewer than one replica, negative times and a rate not above 0.
    """

    name: str
    verify: StepSeconds
    draft: StepSeconds
    prices: PriceTable
    network: Network
    gateway_seconds: float
    limits: Limits = field(default_factory=Limits)
    num_verify_replicas: int = 1
    num_draft_replicas: int = 1
    num_gateways: int = 1
    feature_bytes: int = 0

    def __post_init__(self) -> None:
        counts = {
            "verify replicas": self.num_verify_replicas,
            "draft replicas": self.num_draft_replicas,
            "gateways": self.num_gateways,
            **{name.replace("_", " "): value for name, value in vars(self.limits).items()},
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}, at least 1 is needed")
        times = {
            "network": min(self.network.verify_seconds, self.network.draft_seconds),
            "gateway": self.gateway_seconds,
        }
        for name, seconds in times.items():
            if not 0.0 <= seconds < math.inf:
                raise ValueError(f"{name} time is {seconds} s, from 0 on is taken")
        if not self.network.bytes_per_second > 0:
            raise ValueError(f"the links carry {self.network.bytes_per_second} bytes a second, above 0 is needed")


def measured_site(machine: MeasuredMachine, *, prices: PriceTable | None = None) -> Site:
    """The machine that was recorded, or another one's measured prices of the target with the rest as recorded."""
    table = prices or PriceTable(machine.verify)
    return Site(
        name=MACHINE,
        verify=TableSeconds(table),
        draft=TableSeconds(PriceTable(machine.draft)),
        prices=table,
        network=Network(machine.verify_wire_seconds / 2, machine.draft_wire_seconds / 2),
        gateway_seconds=machine.gateway_seconds,
    )


def gpu_site(name: str, *, context_tokens: int, network_seconds: float) -> Site:
    """A target and its drafter on GPUs: "MODEL@COUNTxGPU:WEIGHTS", such as "kimi-k2@8xb200:fp8"; one GPU and bf16 if not said.

    Raises ValueError with what is known.
    """
    parts = _GPU_SITE.fullmatch(name)
    if parts is None or parts["model"] not in MODELS or parts["gpu"] not in GPUS:
        raise ValueError(
            f"{name!r} is no target; it is {MACHINE!r} or MODEL@COUNTxGPU:WEIGHTS with a model of {', '.join(MODELS)}, "
            f"a GPU of {', '.join(GPUS)}, weights of bf16, fp8"
        )
    num_gpus = int(parts["count"] or 1)
    if num_gpus > _MAX_GPUS:
        raise ValueError(f"{name!r} has {num_gpus} GPUs, at most {_MAX_GPUS} are taken: one node's")
    if context_tokens < 0:
        raise ValueError(f"the context has {context_tokens} tokens, from 0 on is taken")
    gpu, model = GPUS[parts["gpu"]], MODELS[parts["model"]]
    roofline = Roofline(model, gpu, num_gpus, Weights(parts["weights"] or "bf16"), context_tokens)
    return Site(
        name=name,
        verify=roofline,
        draft=BlockDrafter(DRAFTER_PARAMETERS[parts["model"]], BLOCK_SIZE, gpu),
        prices=roofline.table(_TABLE_BATCH_SIZE),
        network=Network(network_seconds, network_seconds),
        gateway_seconds=GPU_GATEWAY_SECONDS,
        limits=Limits(max_sessions=4096, max_step_tokens=8192, prefill_chunk_tokens=2048, max_draft_batch_size=1024),
        feature_bytes=model.hidden_size * 2,
    )


def read_prices(path: Path) -> PriceTable:
    """The price table of a JSON file: {"prices": [{"num_nodes", "batch_size", "seconds"}, ...]}, as verify services keep it.

    Raises ValueError if it is none.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["prices"]
        return PriceTable(StepPrice(row["num_nodes"], row["batch_size"], row["seconds"]) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no price table: {error}") from error
