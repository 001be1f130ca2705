"""Traces: the lines of a generation's events, as they are written, read, recorded and shown."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewire import errors
from treewire.events import Chunk, Finished, Round, Started
from treewire.testing import FakeGateway
from treewire.trace import Failure, TimedEvent, Trace, TraceError, event_line, header_line, read_trace
from treewire.types import Request, Statistics
from treewire.v1 import generate_pb2

from .gateways import chunk, finished, serving, started
from .test_cli import run

REQUEST = Request("Hi", system="Be brief", budget=0, include_rounds=True).to_message()
ROUND = Round(
    token_ids=(4, 9, 7, 8),
    parents=(-1, 0, 0, 1),
    scores=(0.0, -0.25, -2.5, -1.0),
    accepted_nodes=(0, 1),
    committed_token_ids=(9, 2),
    length=7,
    stage_seconds={"draft": 0.001, "verify": 0.25},
    node_texts=("a", " b", "\n", "\\xe2"),
    bonus_text="é",
)
LARGE_SEED = 2**64 - 1


def lines(*events):
    """A trace of these events, a second apart."""
    timed = [event_line(TimedEvent(float(second), event)) for second, event in enumerate(events)]
    return [header_line(REQUEST, "2026-01-01T00:00:00+00:00"), *timed]


@st.composite
def rounds(draw):
    """Rounds of any tree and any path through it."""
    parents = [-1, *(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 12))))]
    path = [draw(st.integers(0, len(parents) - 1))]
    while path[0]:
        path.insert(0, parents[path[0]])
    counts = {"min_size": len(parents), "max_size": len(parents)}
    return Round(
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), **counts))),
        parents=tuple(parents),
        scores=tuple(draw(st.lists(st.floats(-1e6, 0, width=32), **counts))),
        accepted_nodes=tuple(path),
        committed_token_ids=tuple(range(len(path))),
        length=draw(st.integers(1, 2**31 - 1)),
        stage_seconds=draw(st.dictionaries(st.sampled_from(["draft", "verify"]), st.floats(0, 1e6))),
        node_texts=tuple(draw(st.lists(st.text(), **counts))),
        bonus_text=draw(st.text()),
    )


statistics = st.builds(
    Statistics,
    **dict.fromkeys(("output_tokens", "rounds", "lone_roots", "draft_tokens", "accepted_tokens"), st.integers(0, 10**9)),
    acceptance_histogram=st.lists(st.integers(0, 99)).map(tuple),
    ttft_seconds=st.floats(0, 1e6),
    total_seconds=st.floats(0, 1e6),
    stage_seconds=st.dictionaries(st.sampled_from(["prefill", "verify"]), st.floats(0, 1e6)),
    certificate_violations=st.integers(0, 99),
)
events = st.one_of(
    st.builds(Started, st.text(), st.text(), st.integers(1, 10**6), st.integers(0, LARGE_SEED)),
    st.builds(Chunk, st.text(), st.lists(st.integers(0, 10**6)).map(tuple)),
    rounds(),
    st.builds(Finished, st.sampled_from(["stop", "length"]), st.integers(1, 99), statistics, st.none() | st.text()),
    st.builds(Failure, st.text(), st.text(), st.none() | st.floats(0, 99), st.none() | st.text()),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(events, max_size=4))
def test_what_was_written_is_read(written):
    """Any events come back equal, every text on a line of its own, seeds to the last bit."""
    text = "\n".join(lines(*written))
    trace = read_trace(text.split("\n"))
    assert [timed.event for timed in trace.events] == written
    assert [timed.at_seconds for timed in trace.events] == [float(second) for second in range(len(written))]
    assert trace.request == REQUEST


def test_a_seed_is_text():
    """Readers whose numbers are floats do not round it."""
    (_, line) = lines(Started("r", "m", 1, LARGE_SEED))
    assert json.loads(line)["seed"] == str(LARGE_SEED)


def test_fields_of_a_later_writer_are_left_out():
    """A field that is not known changes nothing."""
    header, line = lines(ROUND)
    later = json.dumps({**json.loads(line), "mood": "good"})
    assert read_trace([header, later]).all(Round) == [ROUND]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"event": "tree"}, "event is 'tree'"),
        ({"parents": [-1, 0, 0]}, "parents has 3 entries for 4 nodes"),
        ({"parents": [-1, 0, 3, 1]}, "node 2 has parent 3"),
        ({"parents": [0, 0, 0, 1]}, "node 0 has parent 0"),
        ({"accepted_nodes": [0, 3]}, "are no path"),
        ({"accepted_nodes": [1]}, "they start at the root"),
        ({"accepted_nodes": []}, "they start at the root"),
        ({"accepted_nodes": [0, 9]}, "of 4 nodes"),
        ({"scores": [0, 0, "x", 0]}, "scores is"),
        ({"node_texts": "abcd"}, "node_texts is 'abcd'"),
        ({"committed_token_ids": []}, "a commit has at least its bonus token"),
        ({"stage_seconds": {"draft": "soon"}}, "stage_seconds is"),
        ({"bonus_text": None}, "bonus_text is None"),
        ({"at_seconds": "soon"}, "soon"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(change, reason):
    """TraceError with the number of the line and what is wrong."""
    header, line = lines(ROUND)
    with pytest.raises(TraceError, match=rf"^line 2 .*{reason}"):
        read_trace([header, json.dumps({**json.loads(line), **change})])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ([], "the file is empty"),
        (["[]"], "line 1 is no line of a trace: an object is expected"),
        (["{"], "line 1"),
        (['{"event":"started"}'], "the first line is the header"),
        (['{"event":"trace","version":2}'], "version is 2, this reader knows 1"),
        (['{"event":"trace","version":1,"recorded_at":"now","request":{"budget":"much"}}'], "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text, reason):
    """TraceError says why."""
    with pytest.raises(TraceError, match=reason):
        read_trace(text)


async def record(path, *responses):
    """Record what a gateway with this script answers: exit status, output, errors, and the trace if there is one."""

    async def script(request, context):
        assert request.include_rounds
        for response in responses:
            yield response

    async with serving(script) as gateway:
        arguments = ("trace", "record", str(path), "Hi", "--seed", "5", "--address", gateway.address)
        status, out, err = await asyncio.to_thread(run, *arguments)
    with path.open() as written:
        return status, out, err, read_trace(written)


def with_a_round():
    """A generation of one round, as messages."""
    message = generate_pb2.Round(
        scores=ROUND.scores,
        accepted_nodes=ROUND.accepted_nodes,
        stage_seconds=ROUND.stage_seconds,
        node_texts=ROUND.node_texts,
        bonus_text=ROUND.bonus_text,
    )
    message.tree.token_ids.extend(ROUND.token_ids)
    message.tree.parents.extend(ROUND.parents)
    message.commit.token_ids.extend(ROUND.committed_token_ids)
    message.commit.length = ROUND.length
    round_event = generate_pb2.GenerateResponse(round=message)
    return [started(), chunk("a", 4), chunk(" bé", 9, 2), round_event, finished(3)]


async def test_record_saves_what_it_prints(tmp_path):
    """The text goes to standard output; the file has the request and every event."""
    status, out, err, trace = await record(tmp_path / "t.jsonl", *with_a_round())
    assert (status, out) == (0, "a bé\n")
    assert "1 rounds are in" in err
    assert trace.request.chat.messages[0].content == "Hi"
    assert trace.request.sampling.seed == 5
    assert [type(timed.event) for timed in trace.events] == [Started, Chunk, Chunk, Round, Finished]
    assert trace.all(Round) == [ROUND]
    assert trace.text == "a bé"


async def test_show_draws_the_tree_and_the_summary(tmp_path):
    """Each node with its probability, accepted ones marked, the bonus, the text and the measures."""
    path = tmp_path / "t.jsonl"
    await record(path, *with_a_round())
    status, out, err = run("trace", "show", str(path))
    assert (status, err) == (0, "")
    assert "round 1 of 1  3 drafted, 1 accepted, 2 tokens" in out
    for line in ("“ b” 78% ✓", "“↵” 8%", "“\\xe2” 47%", "“é” bonus", "mean acceptance length", "prompt", "Hi"):
        assert line in out
    only = run("trace", "show", str(path), "--round", "1")[1]
    assert "“ b” 78% ✓" in only
    assert "mean acceptance length" not in only
    assert "“ b” 78% ✓" not in run("trace", "show", str(path), "--no-trees")[1]


def test_a_failed_generation_leaves_a_trace(tmp_path):
    """The error is the last event; the exit status is 1 as without a trace."""
    path = tmp_path / "t.jsonl"
    error = errors.Overloaded("256 generations are running", retry_after_seconds=2)
    with FakeGateway(error) as gateway:
        status, _, err = run("trace", "record", str(path), "Hi", "--address", gateway.address)
    assert (status, err) == (1, "error: 256 generations are running\n")
    with path.open() as lines_of_file:
        (failure,) = read_trace(lines_of_file).all(Failure)
    assert replace(failure, request_id=None) == Failure("OVERLOADED", "256 generations are running", 2.0)
    assert "OVERLOADED: 256 generations are running" in run("trace", "show", str(path))[1]


@pytest.mark.parametrize(
    ("content", "arguments", "reason"),
    [
        ("{", [], "line 1 is no line of a trace"),
        (None, [], "No such file"),
        (f"{header_line(REQUEST, 'now')}\n", ["--round", "2"], "has 0 rounds, round 2 was asked for"),
    ],
)
def test_what_cannot_be_shown_is_told_in_a_line(tmp_path, content, arguments, reason):
    """Status 1 and one line."""
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    status, out, err = run("trace", "show", str(path), *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert reason in err


def test_a_trace_knows_its_text():
    """The chunks in order."""
    assert isinstance(trace := read_trace(lines(Chunk("a", (1,)), Chunk("b", (2,)))), Trace)
    assert trace.text == "ab"
