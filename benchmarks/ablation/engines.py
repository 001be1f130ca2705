"""This file is the engines that an ablation runs in its own process."""

from __future__ import annotations

from pathlib import Path

from draft_service.engine import DraftEngine
from gateway.tokenization import Tokenization
from treewire.checkpoint import names_architecture, read_config
from treewire.core.build import BranchWeights
from treewire.core.simulated import SimulatedModel
from treewire.stack import DFLASH, NGRAM, SIMULATED
from treewire.weights import default_cache_dir, resolve, resolve_drafter
from verify_service.engine import TargetEngine

WIDTH = 64
_KV_TOKENS = 12_288
_MAX_TREE_NODES = 8


def load_target(model: str, drafter: str, num_threads: int) -> TargetEngine:
    """The target, with room for 64 short sequences of one token a step, and the features that the drafter reads, if it does."""
    if model == SIMULATED:
        from verify_service.engines.simulated import SimulatedTarget

        return SimulatedTarget(SimulatedModel())
    from verify_service.engines.transformers import TransformersTarget

    return TransformersTarget.load(
        resolve(model, cache_dir=default_cache_dir()),
        name=model,
        kv_tokens=_KV_TOKENS,
        max_tree_nodes=_MAX_TREE_NODES,
        num_threads=num_threads,
        feature_projection=feature_checkpoint(model, drafter),
    )


def feature_checkpoint(model: str, drafter: str) -> Path | None:
    """The checkpoint of a drafter that reads features: the one shipped for the target, or a directory; None of any other."""
    if drafter == DFLASH:
        return resolve_drafter(model)
    directory = Path(drafter).expanduser()
    return directory if directory.is_dir() and names_architecture(read_config(directory)) else None


def load_drafter(model: str, name: str, weights: BranchWeights) -> DraftEngine:
    """The drafter as the service runs it unless told otherwise: the n-gram one, the simulated one, one that reads features, or
    a causal model. `weights` are what one that reads features ranks its prefixes by."""
    if name == SIMULATED:
        from draft_service.engines.simulated import SimulatedDrafter

        return SimulatedDrafter(SimulatedModel(), horizon=8, width=32)
    if name == NGRAM:
        from draft_service.engines.ngram import NgramDrafter

        return NgramDrafter(horizon=8, width=32)
    checkpoint = feature_checkpoint(model, name)
    if checkpoint is not None:
        from draft_service.engines.checkpoints import AUTO, load_feature_drafter

        target = resolve(model, cache_dir=default_cache_dir())
        return load_feature_drafter(checkpoint, target, name=name, dtype=AUTO, width=WIDTH, weights=weights)
    from draft_service.engines.causal_lm import CausalLMDrafter

    return CausalLMDrafter.load(str(resolve(name, cache_dir=default_cache_dir())), name=name, horizon=5, width=32)


def tokenization_of(model: str) -> Tokenization:
    """The target's tokenizer and chat template."""
    if model == SIMULATED:
        return Tokenization.simulated()
    return Tokenization.from_directory(resolve(model, cache_dir=default_cache_dir(), text_only=True))
