"""A verify service whose simulated engine dies in its tenth step; the rest of the process is the real one."""

import sys
from functools import partial

from tests.system.local_stack import MODEL
from treewire.runtime.server import run, serve
from treewire.runtime.settings import run_command
from verify_service.assembly import SERVICE, assemble
from verify_service.engines.simulated import SimulatedTarget, TargetFaults
from verify_service.settings import VerifySettings


async def main(settings: VerifySettings) -> int:
    process = assemble(settings, lambda: SimulatedTarget(MODEL, faults=TargetFaults(die_at_step=10)))
    async with process.thread:
        return await serve(
            settings,
            register=process.register,
            services=[SERVICE],
            metrics=process.metrics,
            warm_up=process.warm_up,
            died=process.thread.died,
        )


if __name__ == "__main__":
    sys.exit(run_command(VerifySettings, sys.argv[1:], lambda settings: run(settings, partial(main, settings))))
