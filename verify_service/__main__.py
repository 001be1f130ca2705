"""This file is the verify service as a process: `python -m verify_service --help`."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewire import __version__
from treewire.core.budget import StepPrice
from treewire.core.simulated import SimulatedModel
from treewire.runtime.logging import configure_logging, get_logger
from treewire.runtime.server import run, serve
from treewire.runtime.settings import BadSettings, run_command
from treewire.weights import UnconvertibleGguf, default_cache_dir, resolve, resolve_drafter
from verify_service.assembly import SERVICE, assemble
from verify_service.engine import TargetEngine
from verify_service.preparation import InProcess, Preparation
from verify_service.price import BATCH_SIZES, CachedMeasurement, Measure, PriceMeasurement, no_prices
from verify_service.settings import VerifySettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from verify_service.engines.sglang import StartedSglang
    from verify_service.engines.transformers.tensor_parallel import StartedTransformers

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BLOCK_BYTES = 4 << 20

_TRANSFORMERS_SETTINGS = ("device", "dtype", "max_tree_nodes", "kv_tokens", "kv_page_size", "graphs")
"""Settings that the transformers engine takes under the same name, on one rank as on several."""

_SEVERAL_RANKS_SETTINGS = ("tp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id")
"""Those that say where its ranks are."""

_SGLANG_SETTINGS = (
    "device",
    "dtype",
    "tp_size",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "base_gpu_id",
    "mem_fraction_static",
    "max_total_tokens",
    "max_sessions",
    "max_tree_nodes",
    "tree_widths",
    "max_context",
    "attention_backend",
    "quantization",
    "kv_cache_dtype",
    "trust_remote_code",
)
"""Settings that the sglang engine's options have under the same name."""


def prepare(settings: VerifySettings) -> Preparation:
    """The engine that the settings name, about to be loaded. Processes of its own are started here, ahead of any server."""
    if settings.engine == "simulated":
        return InProcess(partial(_simulated, settings))
    if settings.engine == "transformers" and settings.tp_size == 1:
        return InProcess(partial(_transformers, settings))
    return _started(settings)


def _started(settings: VerifySettings) -> StartedSglang | StartedTransformers:
    """An engine whose ranks are processes of their own, started; BadSettings if they cannot be."""
    try:
        return _sglang(settings) if settings.engine == "sglang" else _tensor_parallel(settings)
    except ValueError as error:  # of the options, or Unsupported
        raise BadSettings(str(error)) from error


def _transformers(settings: VerifySettings) -> TargetEngine:
    _share_cores()
    _return_large_blocks()
    from verify_service.engines.transformers import TransformersTarget

    return TransformersTarget.load(
        _model_path(settings), name=settings.model, forward=settings.forward, **_transformers_options(settings)
    )


def _tensor_parallel(settings: VerifySettings) -> StartedTransformers:
    _share_cores()
    from verify_service.engines.transformers.tensor_parallel import StartedTransformers, TensorParallelOptions

    options = TensorParallelOptions(
        _model_path(settings), **_of_same_name(settings, _SEVERAL_RANKS_SETTINGS), **_transformers_options(settings)
    )
    return StartedTransformers(options, settings.model, settings.forward)


def _transformers_options(settings: VerifySettings) -> dict[str, Any]:
    """What the transformers engine is told, on one rank as on several."""
    return {
        **_of_same_name(settings, _TRANSFORMERS_SETTINGS),
        "max_context": settings.max_context or None,
        "num_threads": settings.threads or None,
        "feature_projection": _projection(settings),
    }


def _of_same_name(settings: VerifySettings, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def _projection(settings: VerifySettings) -> Path | None:
    """The checkpoint of the drafter for which features are made."""
    return resolve_drafter(settings.feature_projection) if settings.feature_projection else None


def _share_cores() -> None:
    """Have threads that wait sleep: spinning ones starve the neighbours of a shared machine. Ranks inherit it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _return_large_blocks() -> None:
    """Have glibc give large freed blocks back to the system, those of loading above all: it keeps 200 MB otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _model_path(settings: VerifySettings) -> Path:
    """The model's directory; or its GGUF file, if that is of a kind that only transformers reads (in minutes)."""
    try:
        return resolve(settings.model, cache_dir=settings.cache_dir or default_cache_dir())
    except UnconvertibleGguf:
        return Path(settings.model).expanduser()


def _simulated(settings: VerifySettings) -> TargetEngine:
    from treewire.vocabulary import simulated_tokenizer, vocabulary_hash
    from verify_service.engines.simulated import SimulatedTarget

    if settings.feature_projection:
        raise ValueError("feature_projection is set, the simulated target has no hidden states to make features of")
    model = SimulatedModel(seed=settings.simulated_seed)
    return SimulatedTarget(
        model,
        tokenizer_hash=vocabulary_hash(simulated_tokenizer(model.vocabulary_size)),
        max_context=settings.max_context or 4096,
        max_tree_nodes=settings.max_tree_nodes,
        kv_tokens=settings.kv_tokens,
        kv_page_size=settings.kv_page_size,
        step_seconds=settings.simulated_step_seconds,
    )


def _sglang(settings: VerifySettings) -> StartedSglang:
    from verify_service.engines.sglang import SglangOptions, StartedSglang

    name = settings.model_path or settings.model
    directory = resolve(name, cache_dir=settings.cache_dir or default_cache_dir())
    options = SglangOptions(
        model_path=directory,
        sglang_args=settings.sglang_arguments,
        feature_projection=_projection(settings),
        **_of_same_name(settings, _SGLANG_SETTINGS),
    )
    return StartedSglang(options, name, settings.threads or None)


def tokenizer_of(settings: VerifySettings) -> Tokenizer:
    """The target's tokenizer. Raises ValueError if it is not among the model's files."""
    from treewire.vocabulary import load_tokenizer, simulated_tokenizer

    if settings.engine == "simulated":
        return simulated_tokenizer(SimulatedModel(seed=settings.simulated_seed).vocabulary_size)
    name = settings.model_path or settings.model
    return load_tokenizer(resolve(name, cache_dir=settings.cache_dir or default_cache_dir()))


def price_measure(settings: VerifySettings) -> Measure:
    """How the engine's steps are priced: not at all, or once for a model, its settings and this machine."""
    if settings.measure_prices == "off" or (settings.measure_prices == "auto" and settings.engine == "simulated"):
        return no_prices
    measurement = PriceMeasurement(
        time.perf_counter, _report_price, max_batch_size=min(settings.max_sessions, max(BATCH_SIZES))
    )
    told = (
        *("engine", "model", "device", "dtype", "forward", "graphs", "threads", "max_tree_nodes", "simulated_step_seconds"),
        *("model_path", "tp_size", "attention_backend", "tree_widths", "sglang_args"),
    )
    subject = {name: getattr(settings, name) for name in told}
    machine = {"cpu": _cpu_model(), "cores": os.cpu_count(), "version": __version__}
    directory = (settings.cache_dir or default_cache_dir()) / "prices"
    return CachedMeasurement(measurement, directory, json.dumps({**subject, **machine}))


def _report_price(price: StepPrice) -> None:
    milliseconds = round(price.seconds * 1e3, 2)
    get_logger().info("step priced", nodes=price.num_nodes, sessions=price.batch_size, milliseconds=milliseconds)


def _cpu_model() -> str:
    """The processor's name, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


async def main(settings: VerifySettings) -> int:
    """Serve until stopped; the exit code."""
    preparation = prepare(settings)
    process = assemble(settings, preparation.load, price_measure(settings), partial(tokenizer_of, settings))
    preparation.watch(lambda reason: process.thread.post(partial(process.step.lose, reason)))
    async with process.thread:
        try:
            return await serve(
                settings,
                register=process.register,
                services=[SERVICE],
                metrics=process.metrics,
                warm_up=process.warm_up,
                died=process.thread.died,
            )
        finally:
            process.grammars.close()
            preparation.stop()


def follow(settings: VerifySettings) -> int:
    """Run the ranks of a machine that is not the first, for as long as the first one's service lives; the exit code."""
    configure_logging(settings.log_level, settings.log_format)
    started = _started(settings)
    signal.signal(signal.SIGTERM, lambda number, frame: started.ranks.kill("stopped"))
    return started.ranks.wait()


def serve_or_follow(settings: VerifySettings) -> int:
    """The whole process; the exit code."""
    return follow(settings) if settings.node_rank else run(settings, partial(main, settings))


if __name__ == "__main__":
    sys.exit(run_command(VerifySettings, sys.argv[1:], serve_or_follow))
