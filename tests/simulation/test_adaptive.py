"""In virtual time the adaptive budget is nearly the best fixed one on a dense and on a mixture-of-experts GPU target."""

from __future__ import annotations

import pytest

from treewire.simulation.policies import PolicyName
from treewire.simulation.recording import SHIPPED, Recording, Rounds
from treewire.simulation.simulator import Load, Simulation
from treewire.simulation.site import Site, gpu_site

FIXED = ("plain", "tree:2", "tree:4", "tree:8", "tree:16", "tree:32", "tree:64")
CONCURRENCIES = (1, 2, 4, 8, 16)
NUM_GENERATIONS = 72
RECORDING = Recording.load(SHIPPED)
ROUNDS = Rounds(RECORDING, 64)


def rate(site: Site, policy: str, concurrency: int) -> float:
    """Tokens a second, all streams, learning included."""
    outcome = Simulation(site, ROUNDS, PolicyName.parse(policy), Load(concurrency, NUM_GENERATIONS)).run()
    return sum(generation.num_tokens for generation in outcome.generations) / outcome.seconds


@pytest.mark.parametrize("name", ["qwen3-8b@h200", "kimi-k2@8xb200:fp8"])
def test_adaptive_is_nearly_the_best_fixed_budget_and_never_below_plain(name: str) -> None:
    """Within 5 % of the best of the fixed budgets, and at least 0.97 of plain decoding, at every concurrency."""
    site = gpu_site(name, context_tokens=1024, network_seconds=1e-4)
    for concurrency in CONCURRENCIES:
        rates = {policy: rate(site, policy, concurrency) for policy in FIXED}
        adaptive = rate(site, "adaptive:64", concurrency)
        assert adaptive >= 0.95 * max(rates.values()), (concurrency, adaptive, rates)
        assert adaptive >= 0.97 * rates["plain"], (concurrency, adaptive, rates)
