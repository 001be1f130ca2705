"""This file is how docs/benchmarks.md is written: every table from a file of benchmarks/results. python -m benchmarks.page"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
_COMMAND = "python -m benchmarks.page"

Values = dict[str, Any]


class Section(NamedTuple):
    """A part of the page: its title, the result it shows, the command that makes that, and how."""

    title: str
    result: str
    command: str
    tables: Callable[[Values], list[str]]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    return [_line(heads), _line(["---"] * len(heads)), *(_line(row) for row in rows)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _peers(values: Values) -> list[str]:
    rows = values["rows"]
    base = next(row for row in rows if row["system"] == "transformers" and row["mode"] == "plain")["tokens_per_second"]
    shown = [
        (
            row["system"],
            row["mode"],
            row["concurrency"],
            row["budget"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / base:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['ttft_seconds'] * 1000:.0f} ms",
        )
        for row in rows
    ]
    lines = table(
        ("system", "mode", "streams", "budget", "tokens/s", "to transformers", "tokens a round", "TTFT"),
        shown,
    )
    missing = [f"- not measured: {each['system']}: {each['reason']}" for each in values.get("not_measured", [])]
    return [*lines, *([""] if missing else []), *missing]


def _simulator(values: Values) -> list[str]:
    names = ("tokens_per_second", "seconds_per_token", "ttft_seconds")
    rows = [
        (
            row["concurrency"],
            f"{row['mode']} {row['budget']}" if row["budget"] else row["mode"],
            *(f"{row['measured'][name]:.3g} / {row['predicted'][name]:.3g} ({row['error'][name]:+.0%})" for name in names),
        )
        for row in values["rows"]
    ]
    heads = ("streams", "mode", *(f"{name.replace('_', ' ')}: measured / predicted (error)" for name in names))
    worst = values["largest_error_of_tokens_per_second"]
    return [*table(heads, rows), "", f"The largest error of tokens a second is {worst:.0%}."]


def _structures(values: Values) -> list[str]:
    heads = ("temperature", "schema", "prompts", "valid JSON of it", "tokens", "tokens a round")
    rows = [
        (
            row["temperature"],
            "yes" if row["structured"] else "no",
            row["num_prompts"],
            row["num_valid"],
            row["num_tokens"],
            f"{row['acceptance_length']:.2f}",
        )
        for row in values["rows"]
    ]
    return table(heads, rows)


def _seeded(values: Values) -> list[str]:
    heads = ("temperature", "tree", "at once", "equal to plain sampling", "tokens", "tokens a round")
    rows = [
        (
            row["temperature"],
            row["shape"],
            row["at_once"],
            f"{row['num_equal']} of {row['num_prompts']}",
            row["num_tokens"],
            f"{row['acceptance_length']:.2f}",
        )
        for row in values["rows"]
    ]
    return table(heads, rows)


def _load(values: Values) -> list[str]:
    runs = {name: figures for name, figures in values.items() if name in ("queued", "refused")}
    names = list(next(iter(runs.values())))
    rows = [(name.replace("_", " "), *(_shown(run[name]) for run in runs.values())) for name in names]
    return table(("", *runs), rows)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


SECTIONS = (
    Section("Peers", "peers.json", "make bench", _peers),
    Section("Outputs of a JSON schema", "structures.json", "make bench-structures", _structures),
    Section("The same seed, whatever the trees and the company", "seeded.json", "make bench-seeded", _seeded),
    Section("The simulator against this stack", "simulator_check.json", "make simulator-check", _simulator),
    Section("A crowd at the gateway, simulated engines", "load.json", "make load", _load),
)


def page() -> str:
    """The whole page. A result that is not there is said to be missing, with the command that makes it."""
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{_COMMAND}` from the files of `benchmarks/results`; edit neither. Figures are of the machine and the",
        "commit that each section names, and of no other.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    path = RESULTS / section.result
    if not path.exists():
        return [f"Not measured yet: `{section.command}` writes `benchmarks/results/{section.result}`."]
    values = json.loads(path.read_text(encoding="utf-8"))
    of = ", ".join(f"{name.replace('_', ' ')} {values[name]}" for name in ("cpu", "cores", "commit", "date") if name in values)
    return [f"`{values['command']}`: {of}.", "", *section.tables(values)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
