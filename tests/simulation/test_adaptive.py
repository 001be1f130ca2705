"""In virtual time the adaptive budget is nearly the best fixed one on a dense and on a mixture-of-experts GPU target."""

from __future__ import annotations

import pytest

from treewire.simulation.policies import PolicyName
from treewire.simulation.recording import SHIPPED, Recording, Rounds
from treewire.simulation.simulator import Load, Simulation
from treewire.simulation.site import Site, gpu_site

FIXED = ("plain", "tree:2", "tree:4", "tree:8", "tree:16", "tree:32", "tree:64")
NUM_LEARNING, NUM_GENERATIONS = 48, 144
ROUNDS = Rounds(Recording.load(SHIPPED), 64)


def rate(site: Site, policy: str, concurrency: int) -> float:
    """Tokens a second, all streams, once the first generations have ended: a gateway learns its drafter once in its life."""
    outcome = Simulation(site, ROUNDS, PolicyName.parse(policy), Load(concurrency, NUM_GENERATIONS)).run()
    later = outcome.generations[NUM_LEARNING:]
    return sum(generation.num_tokens for generation in later) / (
        outcome.seconds - outcome.generations[NUM_LEARNING - 1].ended_at
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["qwen3-8b@h200", "kimi-k2@8xb200:fp8"])
def test_adaptive_is_nearly_the_best_fixed_budget_and_never_below_plain(name: str, concurrency: int) -> None:
    """Within 5 % of the best of the fixed budgets, and at least 0.97 of plain decoding."""
    site = gpu_site(name, context_tokens=1024, network_seconds=1e-4)
    rates = {policy: rate(site, policy, concurrency) for policy in FIXED}
    adaptive = rate(site, "adaptive:64", concurrency)
    assert adaptive >= 0.95 * max(rates.values()), (adaptive, rates)
    assert adaptive >= 0.97 * rates["plain"], (adaptive, rates)
