"""What is written about a session, and what is counted."""

import asyncio
import io
import json
import logging

import pytest

from treewire.runtime.logging import configure_logging, get_logger, session_line
from treewire.runtime.metrics import DraftMetrics, GatewayMetrics, Metrics, VerifyMetrics


def logged(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_both_ways_of_logging_are_json_lines_off_a_terminal() -> None:
    """structlog and the standard library write one JSON object a line, at or above the level."""
    stream = io.StringIO()
    configure_logging("info", "auto", stream)
    get_logger().info("session", num_rounds=3)
    logging.getLogger("elsewhere").warning("careful %s", "now")
    get_logger().debug("unseen")
    first, second = logged(stream)
    assert (first["event"], first["num_rounds"], first["level"]) == ("session", 3, "info")
    assert (second["event"], second["level"]) == ("careful now", "warning")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_text_of_users_is_never_logged(log_format: str) -> None:
    """Neither a field that holds text nor a local variable behind a traceback is written."""
    stream = io.StringIO()
    configure_logging("info", log_format, stream)  # type: ignore[arg-type]
    prompt = "".join(("my ", "private ", "words"))
    get_logger().info("session", prompt=prompt, text=prompt)
    try:
        int("".join(prompt.split()[:0]) or "x")
    except ValueError:
        get_logger().exception("failed")
    assert "private" not in stream.getvalue().replace('("my ", "private ", "words")', "")
    assert "ValueError" in stream.getvalue()


def test_a_session_is_one_line() -> None:
    """It is written at the end, with what was gathered, the seconds and the outcome."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    with session_line("draft_session", engine="toy") as fields:
        fields["num_rounds"] = 2
        assert stream.getvalue() == ""
    with pytest.raises(asyncio.CancelledError), session_line("draft_session"):
        raise asyncio.CancelledError
    done, cancelled = logged(stream)
    assert (done["engine"], done["num_rounds"], done["outcome"]) == ("toy", 2, "done")
    assert isinstance(done["seconds"], float)
    assert cancelled["outcome"] == "CancelledError"


def test_rounds_are_counted_as_vllm_counts_them() -> None:
    """Drafts, draft tokens, accepted tokens, those by depth, and lone roots add up over rounds."""
    metrics = Metrics("gateway")
    gateway = GatewayMetrics.on(metrics.registry)
    gateway.observe_round(num_draft_tokens=16, num_accepted_tokens=2, num_emitted_tokens=3)
    gateway.observe_round(num_draft_tokens=8, num_accepted_tokens=0, num_emitted_tokens=1)
    gateway.observe_round(num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=1)
    expected = {
        "treewire_drafts_total": 2,
        "treewire_draft_tokens_total": 24,
        "treewire_accepted_tokens_total": 2,
        "treewire_lone_roots_total": 1,
        "treewire_acceptance_length_count": 3,
        "treewire_acceptance_length_sum": 5,
    }
    assert {name: metrics.registry.get_sample_value(name) for name in expected} == expected
    by_depth = [
        metrics.registry.get_sample_value("treewire_accepted_tokens_per_depth_total", {"depth": str(depth)})
        for depth in (1, 2, 3)
    ]
    assert by_depth == [1, 1, None]


def test_time_per_output_token_is_per_token() -> None:
    """Four tokens that arrive together after 0.2 s took 0.05 s each: four observations, not one."""
    metrics = Metrics("gateway")
    GatewayMetrics.on(metrics.registry).observe_output_tokens(4, 0.2)
    name = "treewire_time_per_output_token_seconds"
    assert metrics.registry.get_sample_value(f"{name}_count") == 4
    assert metrics.registry.get_sample_value(f"{name}_sum") == pytest.approx(0.2)


@pytest.mark.parametrize("role", [DraftMetrics, VerifyMetrics])
def test_steps_are_counted(role: type[DraftMetrics | VerifyMetrics]) -> None:
    """A service with an engine counts its steps, and shows its queue as it is when asked; it has no gateway metrics."""
    metrics = Metrics("toy")
    engine = role.on(metrics.registry)
    engine.observe_step(3, 0.5)
    engine.observe_step(1, 0.25)
    engine.watch_queue(lambda: 7)
    expected = {
        "treewire_step_seconds_count": 2,
        "treewire_step_batch_size_sum": 4,
        "treewire_engine_busy_seconds_total": 0.75,
        "treewire_queue_length": 7,
        "treewire_drafts_total": None,
    }
    assert {name: metrics.registry.get_sample_value(name) for name in expected} == expected
