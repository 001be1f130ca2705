"""This file is how every service logs: structlog on stderr, lines for people on a terminal and JSON elsewhere.

Sessions and surprises are logged, everything else is counted. Text of users never is.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_USER_TEXT_KEYS = frozenset({"prompt", "text", "content", "messages", "token_ids", "prompt_token_ids"})
_WITHHELD = "<withheld>"


def get_logger() -> structlog.stdlib.BoundLogger:
    """The logger of the calling module; its lines carry the request id of the RPC they belong to."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger())


def current_request_id() -> str:
    """The id of the request that the running RPC serves; empty outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def configure_logging(level: LogLevel = "info", log_format: LogFormat = "auto", stream: TextIO = sys.stderr) -> None:
    """Send structlog and the standard library's logging to `stream`, one line an event."""
    for_people = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _withhold_user_text,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(for_people)],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


@contextmanager
def session_line(event: str, **fields: object) -> Iterator[dict[str, object]]:
    """Logs one line when the session ends: what the block put into the yielded fields, its seconds and its outcome."""
    started = time.perf_counter()
    outcome = "done"
    try:
        yield fields
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        get_logger().info(event, **fields, seconds=round(time.perf_counter() - started, 4), outcome=outcome)


def _renderers(for_people: bool) -> list[Processor]:
    """Plain tracebacks in both: rich ones print local variables, and those hold prompts."""
    if for_people:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _withhold_user_text(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for key in _USER_TEXT_KEYS & event.keys():
        event[key] = _WITHHELD
    return event
