"""This file is a trace in the terminal: the draft tree of each round, and what speculation came to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from treewire.events import Finished, Round, Started
from treewire.trace import Failure, Trace
from treewire.types import Statistics

_ACCEPTED, _BONUS, _REJECTED, _ROOT = "bold green", "bold yellow", "dim", "bold"
_STAGES = ("prefill", "draft", "tree_build", "verify")
_MAX_PROMPT_CHARACTERS = 200
_VISIBLE = {ord("\n"): "↵", ord("\t"): "⇥", ord("\r"): "␍"}


def prompt_of(trace: Trace) -> str:
    """What was asked, in a line."""
    request = trace.request
    said = request.chat.messages[-1].content if request.chat.messages else request.text
    line = " ".join(said.split())
    return line if len(line) <= _MAX_PROMPT_CHARACTERS else f"{line[:_MAX_PROMPT_CHARACTERS]}…"


def round_tree(event: Round, title: str) -> Tree:
    """The tree of a round: accepted path and bonus token stand out, what was rejected is faint."""
    accepted = frozenset(event.accepted_nodes)
    view = Tree(_title(event, title), guide_style=_REJECTED)
    branches = [view.add(_label(event, 0, _ROOT))]
    for node, parent in enumerate(event.parents[1:], start=1):
        branches.append(branches[parent].add(_label(event, node, _ACCEPTED if node in accepted else _REJECTED)))
    branches[event.accepted_nodes[-1]].add(Text(f"{_quoted(event.bonus_text)} bonus", _BONUS))
    return view


def _title(event: Round, title: str) -> Text:
    num_accepted = len(event.accepted_nodes) - 1
    times = ", ".join(f"{stage} {seconds * 1000:.1f} ms" for stage, seconds in _in_order(event.stage_seconds))
    return Text.assemble(
        (title, "bold"),
        f"  {len(event.parents) - 1} drafted, {num_accepted} accepted, {num_accepted + 1} tokens",
        (f"  {times}", _REJECTED),
    )


def _label(event: Round, node: int, style: str) -> Text:
    text = _quoted(event.node_texts[node])
    if node == 0:
        return Text(text, style)
    probability = math.exp(event.scores[node] - event.scores[event.parents[node]])
    return Text.assemble((text, style), (f" {probability:.0%}", _REJECTED), (" ✓" if style == _ACCEPTED else "", style))


def _quoted(text: str) -> str:
    return f"“{text.translate(_VISIBLE)}”"


def trace_table(trace: Trace) -> Table:
    """What was asked, and how speculation went."""
    table = Table("measure", "value", title="trace")
    for measure, value in _facts(trace):
        table.add_row(measure, Text(value))
    return table


def _facts(trace: Trace) -> Iterator[tuple[str, str]]:
    yield "recorded", trace.recorded_at
    yield "prompt", prompt_of(trace)
    for started in trace.all(Started):
        yield "model", started.model
        yield "seed", str(started.seed)
    for finished in trace.all(Finished):
        yield from statistics_facts(finished.statistics)
        yield "finish reason", finished.finish_reason
    for failure in trace.all(Failure):
        yield "failed", f"{failure.reason}: {failure.message}"


def statistics_facts(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """How speculation went: measures and their values."""
    yield "tokens", str(statistics.output_tokens)
    yield "rounds", str(statistics.rounds)
    yield "mean acceptance length", f"{statistics.mean_acceptance_length:.2f} tokens a round"
    yield "drafted tokens accepted", f"{statistics.accepted_tokens} of {statistics.draft_tokens}"
    yield "lone roots", str(statistics.lone_roots)
    yield "tokens per second", f"{statistics.tokens_per_second:.1f}"
    yield "time to first token", f"{statistics.ttft_seconds * 1000:.0f} ms"
    stages = {stage: seconds for stage, seconds in statistics.stage_seconds.items() if "." not in stage}
    staged_seconds = sum(stages.values())
    for stage, seconds in _in_order(stages):
        share = seconds / staged_seconds if staged_seconds else 0.0
        yield f"stage {stage}", f"{seconds * 1000:.0f} ms, {share:.0%}"


def _in_order(stage_seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Stages in the order in which they happen, unknown ones last."""
    return sorted(stage_seconds.items(), key=lambda item: _STAGES.index(item[0]) if item[0] in _STAGES else len(_STAGES))
