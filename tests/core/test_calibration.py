"""Weights of branch scores from recorded rounds."""

from __future__ import annotations

import numpy as np
import pytest

from treewire.core.calibration import Choice, choices_of_round, fit
from treewire.core.noise import noise_at
from treewire.core.tree import DraftTree


def test_choices_of_a_round() -> None:
    """Each committed token that was one of several on offer is a choice, with the noise of its own position."""
    tree = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 2, 2, 4))
    scores = (0.0, -1.0, -0.5, -2.0, -1.5, -3.0)
    first, second = choices_of_round(tree, scores, (2, 4, 5, 7), seed=3, root_position=10, temperature=1.0)
    assert (first.taken, second.taken) == (1, 1)
    assert (first.depth, second.depth) == (1, 2)
    np.testing.assert_allclose(first.features[:, 0], [-1.0, -0.5])
    np.testing.assert_allclose(second.features[:, 0], [-1.5, -1.0])
    np.testing.assert_allclose(second.features[:, 1], noise_at(3, 12, [3, 4]))
    cooler, _ = choices_of_round(tree, scores, (2, 4, 5, 7), seed=3, root_position=10, temperature=0.5)
    np.testing.assert_allclose(cooler.features, 0.5 * first.features)
    assert list(choices_of_round(tree, scores, (6,), seed=3, root_position=10, temperature=1.0)) == []


@pytest.mark.parametrize("error", [0.0, 1.5])
def test_fit_recovers_how_far_a_drafter_is_to_be_trusted(error: float) -> None:
    """A perfect drafter gets the noise's own weight, large and equal; one with errors less trust, and less in noise."""
    rng = np.random.default_rng(0)
    choices = []
    for position in range(3000):
        target = rng.normal(scale=2, size=6)
        noise = noise_at(1, position, np.arange(6))
        drafted = target + rng.normal(scale=error, size=6)
        choices.append(Choice(np.column_stack([drafted, noise]), int((target + noise).argmax())))
    weights = fit(choices)
    if error == 0.0:
        assert weights.log_prob > 5
        assert weights.log_prob == pytest.approx(weights.noise, rel=0.1)
    else:
        assert 0.5 < weights.log_prob < 1.5
        assert 0.3 < weights.noise < 2.0


def test_too_few_choices() -> None:
    """Nothing is fitted to a handful of rounds."""
    with pytest.raises(ValueError, match="0 choices were recorded, at least 20"):
        fit([])
