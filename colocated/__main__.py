"""This file is all three services as one process: `python -m colocated GATEWAY_FLAGS -- VERIFY_FLAGS [-- DRAFT_FLAGS]`.

Each part takes the flags of its service; those about listening and callers matter for the gateway alone. Without draft flags
there is no drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import stamina.instrumentation

import draft_service.__main__ as draft_main
import draft_service.assembly
import gateway.__main__ as gateway_main
import verify_service.__main__ as verify_main
import verify_service.assembly
from colocated.assembly import ADDRESSES, assemble
from draft_service.settings import DraftSettings
from gateway.assembly import SERVICE
from gateway.settings import GatewaySettings
from treewire.runtime.server import run, serve
from treewire.runtime.settings import BadSettings, load, run_command
from verify_service.settings import VerifySettings

_SEPARATOR = "--"


async def main(settings: GatewaySettings, verify_settings: VerifySettings, draft_settings: DraftSettings | None) -> int:
    """Serve until stopped; the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])
    preparation = verify_main.prepare(verify_settings)
    verify = verify_service.assembly.assemble(verify_settings, preparation.load, verify_main.price_measure(verify_settings))
    draft = None
    if draft_settings is not None:
        draft = draft_service.assembly.assemble(draft_settings, partial(draft_main.build_engine, draft_settings))
    preparation.watch(lambda reason: verify.thread.post(partial(verify.step.lose, reason)))
    async with AsyncExitStack() as stack:
        stack.callback(preparation.stop)
        load_tokenization = partial(gateway_main.load_tokenization, settings)
        process = await stack.enter_async_context(assemble(settings, load_tokenization, verify, draft))
        doors = [await stack.enter_async_context(process.gateway.http_door())] if settings.http_bind else []
        return await serve(
            settings,
            register=process.gateway.register,
            services=[SERVICE],
            metrics=process.gateway.metrics,
            warm_up=process.warm_up,
            died=verify.thread.died,
            doors=doors,
        )


def sections(argv: Sequence[str]) -> list[list[str]]:
    """The parts of the command line."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == _SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def command(argv: Sequence[str]) -> int:
    """The whole process; the exit code."""
    gateway_flags, *others = sections(argv)
    if not 1 <= len(others) <= 2:
        print("colocated: GATEWAY_FLAGS -- VERIFY_FLAGS [-- DRAFT_FLAGS]", file=sys.stderr)
        return 2
    upstreams = ADDRESSES if len(others) > 1 else (*ADDRESSES[:-1], "")
    try:
        verify_settings = load(VerifySettings, others[0])
        draft_settings = load(DraftSettings, others[1]) if len(others) > 1 else None
    except BadSettings as error:
        print(f"colocated: {error}", file=sys.stderr)
        return 2
    return run_command(
        GatewaySettings,
        [*gateway_flags, *upstreams],
        lambda settings: run(settings, partial(main, settings, verify_settings, draft_settings)),
    )


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
