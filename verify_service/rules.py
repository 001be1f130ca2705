"""This file is the rules by which this service accepts, as functions of a tree and of what the target answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from treewire.core.acceptance import Acceptance, accept
from treewire.core.hybrid import accept_hybrid
from treewire.core.tree import DraftTree
from verify_service.engine import Posterior

Rule: TypeAlias = Callable[[DraftTree, Posterior], Acceptance]


def shared_noise(tree: DraftTree, posterior: Posterior) -> Acceptance:
    """Follow the target's own choices."""
    return accept(tree, posterior.token_ids)


def hybrid(seed: int, root_position: int) -> Rule:
    """Accept drawn nodes by rejection sampling, follow the target's own choices elsewhere."""

    def rule(tree: DraftTree, posterior: Posterior) -> Acceptance:
        assert posterior.distributions is not None, "a scored tree has distributions"
        probabilities = posterior.distributions.probabilities
        return accept_hybrid(tree, posterior.token_ids, probabilities, seed=seed, root_position=root_position)

    return rule
