"""This file is the gateway as a process: `python -m gateway --help`."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import partial

import stamina.instrumentation

from gateway.assembly import SERVICE, assemble
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from treewire.runtime.logging import get_logger
from treewire.runtime.server import run, serve
from treewire.runtime.settings import run_command
from treewire.weights import default_cache_dir, resolve

SIMULATED = "simulated"
_log = get_logger()


def load_tokenization(settings: GatewaySettings) -> Tokenization:
    """The tokenizer and the chat template of the model that the settings name."""
    if settings.model == SIMULATED:
        return Tokenization.simulated()
    return Tokenization.from_directory(
        resolve(settings.model, cache_dir=settings.cache_dir or default_cache_dir(), text_only=True)
    )


async def main(settings: GatewaySettings) -> int:
    """Serve until stopped; the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])  # a lost drafter is logged once, not at every attempt
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(assemble(settings, partial(load_tokenization, settings)))
        try:
            doors = [await stack.enter_async_context(process.http_door())] if settings.http_bind else []
        except OSError as error:
            _log.error("cannot serve", reason=str(error))
            return 1
        return await serve(
            settings,
            register=process.register,
            services=[SERVICE],
            metrics=process.metrics,
            warm_up=process.warm_up,
            doors=doors,
        )


if __name__ == "__main__":
    sys.exit(run_command(GatewaySettings, sys.argv[1:], lambda settings: run(settings, partial(main, settings))))
