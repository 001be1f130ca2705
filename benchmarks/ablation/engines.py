"""This file is the engines that an ablation runs in its own process."""

from __future__ import annotations

from draft_service.engine import DraftEngine
from gateway.tokenization import Tokenization
from treewire.core.simulated import SimulatedModel
from treewire.weights import default_cache_dir, resolve
from verify_service.engine import TargetEngine

SIMULATED = "simulated"
_KV_TOKENS = 12_288
_MAX_TREE_NODES = 8


def load_target(model: str, num_threads: int) -> TargetEngine:
    """The target, with room for 64 short sequences of one token a step."""
    if model == SIMULATED:
        from verify_service.engines.simulated import SimulatedTarget

        return SimulatedTarget(SimulatedModel())
    from verify_service.engines.transformers import TransformersTarget

    path = resolve(model, cache_dir=default_cache_dir())
    return TransformersTarget.load(
        path, name=model, kv_tokens=_KV_TOKENS, max_tree_nodes=_MAX_TREE_NODES, num_threads=num_threads
    )


def load_drafter(name: str) -> DraftEngine:
    """The n-gram drafter, the simulated one, or a causal model as a drafter."""
    if name == SIMULATED:
        from draft_service.engines.simulated import SimulatedDrafter

        return SimulatedDrafter(SimulatedModel(), horizon=8, width=32)
    if name == "ngram":
        from draft_service.engines.ngram import NgramDrafter

        return NgramDrafter(horizon=8, width=32)
    from draft_service.engines.causal_lm import CausalLMDrafter

    return CausalLMDrafter.load(str(resolve(name, cache_dir=default_cache_dir())), name=name, horizon=5, width=32)


def tokenization_of(model: str) -> Tokenization:
    """The target's tokenizer and chat template."""
    if model == SIMULATED:
        return Tokenization.simulated()
    return Tokenization.from_directory(resolve(model, cache_dir=default_cache_dir(), text_only=True))
