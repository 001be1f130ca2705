"""This file is the draft service as a process: `python -m draft_service --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from draft_service.assembly import SERVICE, assemble
from draft_service.engine import DraftEngine
from draft_service.settings import DraftSettings
from treewire.runtime.server import run, serve
from treewire.runtime.settings import run_command
from treewire.weights import default_cache_dir, resolve, resolve_drafter


def build_engine(settings: DraftSettings) -> DraftEngine:
    """The engine that the settings name, loaded. Heavy imports happen here."""
    builders: dict[str, Callable[[DraftSettings], DraftEngine]] = {
        "ngram": _ngram,
        "causal-lm": _causal_lm,
        "dflash": _dflash,
        "simulated": _simulated,
    }
    if settings.engine != "dflash" and settings.beam not in (None, 1):
        raise ValueError(
            f"beam is {settings.beam}, the {settings.engine} engine describes depths, not the children of a prefix"
        )
    return builders[settings.engine](settings)


def _ngram(settings: DraftSettings) -> DraftEngine:
    from draft_service.engines.ngram import NgramDrafter

    return NgramDrafter(horizon=settings.horizon, width=settings.width)


def _causal_lm(settings: DraftSettings) -> DraftEngine:
    from draft_service.engines.causal_lm import CausalLMDrafter
    from treewire.vocabulary import load_tokenizer, vocabulary_hash

    if not settings.model:
        raise ValueError("model is empty, the causal-lm engine needs one: an alias, a directory or a hub id")
    path = resolve(settings.model, cache_dir=settings.cache_dir or default_cache_dir())
    return CausalLMDrafter.load(
        str(path),
        name=settings.model,
        device=settings.device,
        horizon=settings.horizon,
        width=settings.width,
        num_threads=settings.threads or None,
        kv_tokens=settings.kv_tokens,
        kv_page_size=settings.kv_page_size,
        tokenizer_hash=vocabulary_hash(load_tokenizer(path)),
    )


def _dflash(settings: DraftSettings) -> DraftEngine:
    from draft_service.engines.checkpoints import load_feature_drafter

    if not settings.model or not settings.target:
        raise ValueError(
            "the dflash engine needs a model, its checkpoint, and a target, whose embedding and output head it shares"
        )
    set_here = {name: getattr(settings, name) for name in ("horizon", "width", "beam") if name in settings.model_fields_set}
    return load_feature_drafter(
        resolve_drafter(settings.model),
        resolve(settings.target, cache_dir=settings.cache_dir or default_cache_dir()),
        name=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        num_threads=settings.threads or None,
        kv_tokens=settings.kv_tokens,
        kv_page_size=settings.kv_page_size,
        **set_here,
    )


def _simulated(settings: DraftSettings) -> DraftEngine:
    from draft_service.engines.simulated import DrafterFaults, SimulatedDrafter
    from treewire.core.simulated import SimulatedModel
    from treewire.vocabulary import simulated_tokenizer, vocabulary_hash

    model = SimulatedModel(seed=settings.simulated_seed)
    return SimulatedDrafter(
        model,
        tokenizer_hash=vocabulary_hash(simulated_tokenizer(model.vocabulary_size)),
        agreement=settings.simulated_agreement,
        horizon=settings.horizon,
        width=settings.width,
        faults=DrafterFaults(step_seconds=settings.simulated_step_seconds),
    )


async def main(settings: DraftSettings) -> int:
    """Serve until stopped; the exit code."""
    process = assemble(settings, partial(build_engine, settings))
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
    sys.exit(run_command(DraftSettings, sys.argv[1:], lambda settings: run(settings, partial(main, settings))))
