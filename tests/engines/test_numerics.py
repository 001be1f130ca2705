"""How far a row of logits depends on what else is in its step: the bound that docs/limits.md states for "equal"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engines.tiny_models import save_tiny_model
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.weights import resolve
from verify_service.engine import Posterior, PrefillChunk, Scoring
from verify_service.engines.transformers import TransformersTarget

LARGEST_DIFFERENCE = 1e-3  # of log-probs, float32
SAMPLING = Sampling(temperature=1.0, seed=5)


def load(folder: Path) -> TransformersTarget:
    return TransformersTarget.load(folder, kv_tokens=1024, max_tree_nodes=65, num_threads=1)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[], TransformersTarget]:
    """A model of two layers."""
    return lambda: load(save_tiny_model(tmp_path, "llama"))


def log_probs(posterior: Posterior) -> NDArray[np.float64]:
    assert posterior.distributions is not None
    return np.log(np.maximum(posterior.distributions.probabilities(0), 1e-30))


def largest_difference(target: TransformersTarget) -> float:
    """Of the log-probs behind the root: alone as a lone root, and as the root of 65 nodes in a step of 8 sessions."""
    prompt = tuple(range(20, 44))
    for session in range(9):
        target.open(session, (*prompt, 30 + session % 8), SAMPLING)
    (first,) = target.step([PrefillChunk(0, (*prompt, 30), last=True)])
    target.step([PrefillChunk(session, (*prompt, 30 + session % 8), last=True) for session in range(1, 9)])
    root = first.token_ids[0]
    star = DraftTree((root, *range(10, 74)), (-1, *[0] * 64))
    (alone,) = target.step([Scoring(8, DraftTree.lone_root(root))])
    together = target.step(
        [Scoring(0, star), *(Scoring(session, DraftTree.lone_root(30 + session)) for session in range(1, 8))]
    )
    return float(np.abs(log_probs(alone) - log_probs(together[0])).max())


def test_a_row_hardly_depends_on_its_step(tiny: Callable[[], TransformersTarget]) -> None:
    """Batch and tree change log-probs by no more than the stated bound."""
    assert largest_difference(tiny()) < LARGEST_DIFFERENCE


@pytest.mark.model
def test_a_row_of_the_real_model_hardly_depends_on_its_step() -> None:
    """The same for the default model, in float32."""
    assert largest_difference(load(resolve("smollm2-135m"))) < LARGEST_DIFFERENCE
