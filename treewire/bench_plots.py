"""This file is a bench as pictures: rates over concurrency, acceptance by depth, stage shares, the price of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from treewire.bench import Row
from treewire.core.budget import StepPrice


def draw(rows: Sequence[Row], prices: Sequence[StepPrice], path: Path) -> None:
    """Write four pictures as one PNG; without prices the last one says so."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, ((rates, depths), (stages, steps)) = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _rates(rates, rows)
    _depths(depths, rows)
    _stages(stages, rows)
    _prices(steps, prices)
    for axes in (rates, depths, steps):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(row: Row) -> str:
    return f"{row.mode} {row.budget}" if row.mode in ("chain", "tree") else row.mode


def _rates(axes: Any, rows: Sequence[Row]) -> None:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_label(row), []).append(row)
    for label, line in lines.items():
        axes.plot([row.concurrency for row in line], [row.tokens_per_second for row in line], marker="o", label=label)
    axes.set(xlabel="streams", ylabel="tokens a second, all streams", title="rate", ylim=(0, None))


def _depths(axes: Any, rows: Sequence[Row]) -> None:
    """The share of rounds that gave more than 1, 2, ... tokens, of the fewest streams."""
    fewest = min(row.concurrency for row in rows)
    for row in rows:
        if row.concurrency == fewest and row.mode != "plain" and any(row.tokens_per_round):
            beyond = list(accumulate(reversed(row.tokens_per_round)))[::-1]
            shares = [count / beyond[0] for count in beyond[1:]]
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=_label(row))
    axes.set(xlabel="depth", ylabel="share of rounds that accept it", title="acceptance by depth", ylim=(0, 1))


def _stages(axes: Any, rows: Sequence[Row]) -> None:
    below = [0.0] * len(rows)
    for stage in sorted({stage for row in rows for stage in row.stage_shares}):
        shares = [row.stage_shares.get(stage, 0.0) for row in rows]
        axes.bar(range(len(rows)), shares, bottom=below, label=stage)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    labels = [f"{_label(row)} x{row.concurrency}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize="small")
    axes.set(ylabel="share of a generation", title="stages")
    axes.legend(fontsize="small")


def _prices(axes: Any, prices: Sequence[StepPrice]) -> None:
    for batch_size in sorted({price.batch_size for price in prices}):
        curve = sorted((price.num_nodes, price.seconds) for price in prices if price.batch_size == batch_size)
        nodes, seconds = zip(*curve, strict=True)
        axes.plot(nodes, [each * 1000 for each in seconds], marker="o", label=f"{batch_size} sessions")
    title = "price of a step" if prices else "price of a step: none was measured"
    axes.set(xlabel="nodes of each tree, root included", ylabel="ms", title=title)
