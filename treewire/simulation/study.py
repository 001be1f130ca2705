"""This file is `treewire simulate`: policies by loads at a site, each in a simulation of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from treewire.core.budget import PriceTable
from treewire.simulation.policies import PolicyName
from treewire.simulation.recording import Recording, Rounds
from treewire.simulation.report import Row, row_of
from treewire.simulation.simulator import MAX_STREAMS, Load, Simulation
from treewire.simulation.site import MACHINE, Site, gpu_site, measured_site

DEFAULT_POLICIES = ("plain", "chain:4", "tree:8", "tree:32", "adaptive:64")
DEFAULT_STREAMS = (1, 4, 16, 64, 256)
FEWEST_GENERATIONS = 16
GPU_NETWORK_SECONDS = 0.0001
GPU_LINK_BYTES_PER_SECOND = 12.5e9
_GBIT_BYTES = 1e9 / 8


@dataclass(frozen=True)
class SiteChanges:
    """What differs from a site as it is measured or published; None and 1 leave it so."""

    prices: PriceTable | None = None
    context_tokens: int = 1024
    network_seconds: float | None = None
    link_gbit: float | None = None
    gateway_seconds: float | None = None
    max_step_tokens: int | None = None
    max_sessions: int | None = None
    num_verify_replicas: int = 1
    num_draft_replicas: int = 1
    num_gateways: int = 1

    def site(self, name: str, recording: Recording) -> Site:
        """The site of that name with these changes. ValueError, with value and limit, on what cannot be."""
        site = self._named(name, recording)
        network, limits = site.network, site.limits
        if self.network_seconds is not None:
            network = replace(network, verify_seconds=self.network_seconds, draft_seconds=self.network_seconds)
        if self.link_gbit is not None:
            network = replace(network, bytes_per_second=self.link_gbit * _GBIT_BYTES)
        if self.max_step_tokens is not None:
            limits = replace(limits, max_step_tokens=self.max_step_tokens)
        if self.max_sessions is not None:
            limits = replace(limits, max_sessions=self.max_sessions)
        return replace(
            site,
            network=network,
            limits=limits,
            gateway_seconds=site.gateway_seconds if self.gateway_seconds is None else self.gateway_seconds,
            num_verify_replicas=self.num_verify_replicas,
            num_draft_replicas=self.num_draft_replicas,
            num_gateways=self.num_gateways,
        )

    def _named(self, name: str, recording: Recording) -> Site:
        if name == MACHINE:
            return measured_site(recording.machine, prices=self.prices)
        if self.prices is not None:
            raise ValueError(f"a price table is for the site {MACHINE!r}, this is {name!r}")
        site = gpu_site(name, context_tokens=self.context_tokens, network_seconds=GPU_NETWORK_SECONDS)
        return replace(site, network=replace(site.network, bytes_per_second=GPU_LINK_BYTES_PER_SECOND))


@dataclass(frozen=True)
class Study:
    """What is simulated: every policy with every number of streams, each of which runs so many generations one after the other.

    Few streams run FEWEST_GENERATIONS together, so that figures stand on more than one answer. ValueError on what cannot be.
    """

    site: Site
    policies: Sequence[PolicyName]
    streams: Sequence[int] = DEFAULT_STREAMS
    generations_per_stream: int = 2
    ramp_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.policies or not self.streams:
            raise ValueError("at least one policy and one number of streams are needed")
        if not 1 <= self.generations_per_stream <= 100:
            raise ValueError(f"each stream runs {self.generations_per_stream} generations, from 1 to 100 are taken")
        for count in self.streams:
            if not 1 <= count <= MAX_STREAMS:
                raise ValueError(f"there are {count} streams, from 1 to {MAX_STREAMS} are taken")
        self.loads()

    def loads(self) -> list[Load]:
        """The load of each number of streams."""
        return [
            Load(count, max(FEWEST_GENERATIONS, count * self.generations_per_stream), self.ramp_seconds, self.seed)
            for count in self.streams
        ]

    def run(self, recording: Recording, *, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """The rows, those of one load together. The same study of the same recording gives the same rows."""
        rounds = Rounds(recording, max(1, *(policy.max_budget for policy in self.policies)))
        rows = []
        for load, policy in product(self.loads(), self.policies):
            rows.append(row_of(self.site, policy, load, Simulation(self.site, rounds, policy, load).run()))
            on_row(rows[-1])
        return rows
