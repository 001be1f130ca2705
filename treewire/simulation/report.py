"""This file is what a simulation says: rows of figures, the bottleneck of each, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from treewire.simulation.policies import PolicyName
from treewire.simulation.simulator import STAGES, Generation, Load, Outcome
from treewire.simulation.site import Site

SATURATED = 0.9
"""A part that is busy for more than this share of the time holds up the rest."""


@dataclass(frozen=True)
class Row:
    """One policy under one load at one site. Times are virtual seconds.

    `seconds_per_token` is of a generation's tokens after its first; `ttft_seconds` is from a generation's arrival. `busy` are
    shares of the time, by part; the network's is that of its busiest link. `waited` are shares of the generations' rounds, by
    what they wait for. `bottleneck` is the busiest part if it is saturated, else "latency:" with what rounds wait for most.
    """

    system: str
    site: str
    mode: str
    concurrency: int
    budget: int
    tokens_per_second: float
    mean_acceptance_length: float
    ttft_seconds: float
    ttft_seconds_p99: float
    seconds_per_token: float
    seconds_per_token_p99: float
    busy: dict[str, float]
    waited: dict[str, float]
    bottleneck: str
    mean_batch_size: float
    num_generations: int
    num_tokens: int
    virtual_seconds: float

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        return asdict(self)


def row_of(site: Site, policy: PolicyName, load: Load, outcome: Outcome) -> Row:
    """The figures of an outcome."""
    generations = outcome.generations
    num_tokens = sum(generation.num_tokens for generation in generations)
    num_rounds = sum(generation.num_rounds for generation in generations)
    ttft = [generation.first_token_at - generation.begun_at for generation in generations]
    paces = [_seconds_per_token(generation) for generation in generations]
    waited = {stage: sum(generation.waited[stage] for generation in generations) for stage in STAGES}
    total = sum(waited.values()) or 1.0
    waited = {stage: seconds / total for stage, seconds in waited.items()}
    return Row(
        system="simulation",
        site=site.name,
        mode=policy.mode,
        concurrency=load.num_streams,
        budget=policy.max_budget,
        tokens_per_second=num_tokens / outcome.seconds,
        mean_acceptance_length=(num_tokens - len(generations)) / num_rounds if num_rounds else 0.0,
        ttft_seconds=_quantile(ttft, 0.5),
        ttft_seconds_p99=_quantile(ttft, 0.99),
        seconds_per_token=_quantile(paces, 0.5),
        seconds_per_token_p99=_quantile(paces, 0.99),
        busy=outcome.busy,
        waited=waited,
        bottleneck=bottleneck(outcome.busy, waited),
        mean_batch_size=outcome.mean_batch_size,
        num_generations=len(generations),
        num_tokens=num_tokens,
        virtual_seconds=outcome.seconds,
    )


def bottleneck(busy: dict[str, float], waited: dict[str, float]) -> str:
    """The part that is saturated; if none is, what the rounds of a generation wait for most."""
    busiest = max(busy, key=lambda part: busy[part])
    if busy[busiest] >= SATURATED:
        return busiest
    return f"latency: {max(waited, key=lambda stage: waited[stage])}"


def _seconds_per_token(generation: Generation) -> float:
    return (generation.ended_at - generation.first_token_at) / max(1, generation.num_tokens - 1)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


def table_of(rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table(
        *("streams", "policy", "tokens/s", "to plain", "tokens a round", "TTFT", "p99", "ms a token", "p99"),
        *("draft", "verify", "gateway", "network", "bottleneck"),
        title=f"treewire simulate: {rows[0].site}",
    )
    plain = {row.concurrency: row.tokens_per_second for row in rows if row.mode == "plain"}
    for row in rows:
        base = plain.get(row.concurrency)
        table.add_row(
            f"{row.concurrency:,}",
            f"{row.mode} {row.budget}" if row.budget else row.mode,
            f"{row.tokens_per_second:,.1f}",
            f"{row.tokens_per_second / base:.2f}x" if base else "",
            f"{row.mean_acceptance_length:.2f}",
            *(f"{seconds * 1000:.0f} ms" for seconds in (row.ttft_seconds, row.ttft_seconds_p99)),
            *(f"{seconds * 1000:.2f}" for seconds in (row.seconds_per_token, row.seconds_per_token_p99)),
            *(f"{row.busy[part]:.0%}" for part in ("draft", "verify", "gateway", "network")),
            row.bottleneck,
        )
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write rates, paces and first tokens over streams, and what is busy under the last policy, as one PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, ((rates, paces), (firsts, parts)) = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(f"{row.mode} {row.budget}" if row.budget else row.mode, []).append(row)
    for label, line in by_policy.items():
        streams = [row.concurrency for row in line]
        rates.plot(streams, [row.tokens_per_second for row in line], marker="o", label=label)
        paces.plot(streams, [row.seconds_per_token * 1000 for row in line], marker="o", label=label)
        firsts.plot(streams, [row.ttft_seconds * 1000 for row in line], marker="o", label=label)
    label, line = list(by_policy.items())[-1]
    for part in ("draft", "verify", "gateway", "network"):
        parts.plot([row.concurrency for row in line], [row.busy[part] for row in line], marker="o", label=part)
    rates.set(ylabel="tokens a second, all streams", title=rows[0].site, yscale="log")
    paces.set(ylabel="ms a token, median", title="pace of a stream", yscale="log")
    firsts.set(ylabel="ms, median", title="time to first token", yscale="log")
    parts.set(ylabel="share of the time that it is busy", title=f"what is busy: {label}", ylim=(0, 1.05))
    for axes in (rates, paces, firsts, parts):
        axes.set(xlabel="streams", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
