"""The simulator loses no token, adds up to what can be calculated by hand, and gives the same figures again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.recordings import HORIZON, MACHINE, recording
from treewire.core.budget import PriceTable
from treewire.simulation.policies import PolicyName
from treewire.simulation.recording import Recording, Rounds
from treewire.simulation.report import Row
from treewire.simulation.simulator import Load, Outcome, Simulation
from treewire.simulation.site import Limits, Network, Site, gpu_site, measured_site
from treewire.simulation.study import Study

POLICIES = ("plain", "chain:3", "tree:1", "tree:8", "tree:32", "adaptive:32")


def simulated(policy: str, load: Load, site: Site | None = None, recorded: Recording | None = None) -> Outcome:
    """One simulation."""
    recorded = recorded or recording()
    rounds = Rounds(recorded, 64)
    return Simulation(site or measured_site(MACHINE), rounds, PolicyName.parse(policy), load).run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("streams", [1, 3, 50])
def test_tokens_out_are_the_tokens_recorded(policy: str, streams: int) -> None:
    """Whatever the policy and the load, every generation emits what was recorded of it, and all that were asked for end."""
    recorded = recording()
    outcome = simulated(policy, Load(streams, 60))
    assert sorted(generation.num_tokens for generation in outcome.generations) == sorted(
        recorded.generations[number % 3].num_tokens for number in range(60)
    )
    for generation in outcome.generations:
        gained = generation.num_tokens - 1
        assert gained / (HORIZON + 1) <= generation.num_rounds <= gained
        assert 0.0 <= generation.begun_at <= generation.first_token_at <= generation.ended_at <= outcome.seconds


def test_a_single_stream_takes_the_sum_of_its_prices() -> None:
    """Plain decoding of one answer: the prompt's way and step, then one way and one step a token."""
    recorded, site = recording((20,)), measured_site(MACHINE)
    outcome = simulated("plain", Load(1, 1), site, recorded)
    way = MACHINE.verify_wire_seconds + MACHINE.gateway_seconds
    prefill = way + MACHINE.gateway_seconds + site.verify.seconds(40, 1)
    assert outcome.generations[0].first_token_at == pytest.approx(prefill)
    assert outcome.seconds == pytest.approx(prefill + 19 * (way + site.verify.seconds(1, 1)))


def test_a_single_stream_with_trees_takes_the_sum_of_its_prices() -> None:
    """Each round is a draft, a step over the whole tree, both ways and two messages at the gateway."""
    recorded, site = recording((20,)), measured_site(MACHINE)
    outcome = simulated("tree:8", Load(1, 1), site, recorded)
    generation = outcome.generations[0]
    a_round = MACHINE.verify_wire_seconds + MACHINE.draft_wire_seconds + 2 * MACHINE.gateway_seconds
    a_round += site.draft.seconds(1, 1) + site.verify.seconds(9, 1)
    assert generation.ended_at - generation.first_token_at == pytest.approx(generation.num_rounds * a_round)
    assert sum(generation.waited.values()) == pytest.approx(generation.num_rounds * a_round)


def test_more_prompts_than_a_chunk_are_steps_of_their_own() -> None:
    """A prompt of 40 in chunks of 16 is three steps, the last of 8."""
    site = replace(measured_site(MACHINE), limits=Limits(prefill_chunk_tokens=16))
    outcome = simulated("plain", Load(1, 1), site, recording((2,)))
    steps = 2 * site.verify.seconds(16, 1) + site.verify.seconds(8, 1)
    ways = MACHINE.verify_wire_seconds + 2 * MACHINE.gateway_seconds
    assert outcome.generations[0].first_token_at == pytest.approx(steps + ways)


def test_steps_are_shared_up_to_their_limit() -> None:
    """Many plain streams share steps; a limit on a step's positions, or on sessions, makes more of them."""
    shared = simulated("plain", Load(16, 32))
    narrow = simulated(
        "plain", Load(16, 32), replace(measured_site(MACHINE), limits=Limits(max_step_tokens=4, prefill_chunk_tokens=4))
    )
    queued = simulated("plain", Load(16, 32), replace(measured_site(MACHINE), limits=Limits(max_sessions=2)))
    assert shared.mean_batch_size > 4 >= narrow.mean_batch_size
    assert queued.mean_batch_size <= 2
    assert len(queued.generations) == 32


def test_what_costs_more_takes_longer() -> None:
    """A slower network, a slower gateway or dearer steps never give more tokens a second; a second replica never fewer."""
    base = measured_site(MACHINE)
    load = Load(8, 32)

    def rate(site: Site) -> float:
        return 1.0 / simulated("tree:8", load, site).seconds

    slower = replace(base.network, verify_seconds=0.02, draft_seconds=0.02)
    assert rate(replace(base, network=slower)) < rate(base)
    assert rate(replace(base, gateway_seconds=0.01)) < rate(base)
    dear = PriceTable(replace(price, seconds=price.seconds * 2) for price in MACHINE.verify)
    assert rate(measured_site(MACHINE, prices=dear)) < rate(base)
    assert rate(replace(base, num_verify_replicas=2)) > rate(base)


def test_the_bottleneck_is_where_the_time_goes() -> None:
    """A slow part that every round passes is named, a stack without a saturated part is bound by latency."""
    recorded, base = recording(), measured_site(MACHINE)

    def row(site: Site, streams: int = 16) -> Row:
        return Study(site, [PolicyName.parse("tree:8")], [streams]).run(recorded)[0]

    assert row(base).bottleneck == "verify"
    assert row(replace(base, gateway_seconds=0.05)).bottleneck == "gateway"
    slow_drafter = measured_site(replace(MACHINE, draft=tuple(replace(p, seconds=0.2) for p in MACHINE.draft)))
    assert row(slow_drafter).bottleneck == "draft"
    assert row(replace(base, network=Network(0.0, 0.0, 1000.0), feature_bytes=100)).bottleneck == "network"
    assert row(replace(base, network=Network(0.3, 0.3)), streams=1).bottleneck == "latency: network"


@pytest.mark.parametrize("policy", ["tree:8", "adaptive:32"])
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    """Virtual time has no clock; streams that begin at drawn times begin at the same ones again."""
    loads = [Load(20, 60, ramp_seconds=2.0, seed=seed) for seed in (1, 1, 2)]
    ends = [[each.ended_at for each in simulated(policy, load).generations] for load in loads]
    assert ends[0] == ends[1] != ends[2]


def test_ten_thousand_streams_end() -> None:
    """The largest load, on a GPU site, with the policy that computes most, ends: every stream has its tokens."""
    site = replace(gpu_site("qwen3-8b@h200:fp8", context_tokens=512, network_seconds=1e-4), num_verify_replicas=4)
    outcome = simulated("adaptive:16", Load(10_000, 10_000), site, recording((6, 4)))
    assert len(outcome.generations) == 10_000
    assert sum(generation.num_tokens for generation in outcome.generations) == 50_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Load(0, 1), "0 streams, from 1 to 10000"),
        (lambda: Load(10_001, 10_001), "10001 streams, from 1 to 10000"),
        (lambda: Load(2, 1), "1 generations are less than one for each of 2"),
        (lambda: Load(1, 1, -1.0), "-1.0 s"),
        (lambda: PolicyName.parse("bush:3"), "'bush:3' is no policy"),
        (lambda: PolicyName.parse("tree:0"), "budget 0, from 1 to 512"),
        (lambda: PolicyName.parse("plain:3"), "'plain:3' is no policy"),
        (lambda: replace(measured_site(MACHINE), num_draft_replicas=0), "draft replicas is 0"),
        (lambda: replace(measured_site(MACHINE), gateway_seconds=-1.0), "gateway time is -1.0"),
        (lambda: replace(measured_site(MACHINE), network=Network(0.0, 0.0, 0.0)), "0.0 bytes a second"),
        (lambda: gpu_site("gpt-2@h200", context_tokens=1, network_seconds=0.0), "qwen3-8b, llama-3.1-70b"),
        (lambda: gpu_site("qwen3-8b@64xh200", context_tokens=1, network_seconds=0.0), "64 GPUs, at most 16"),
        (lambda: gpu_site("qwen3-8b@h200", context_tokens=-1, network_seconds=0.0), "-1 tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_limit(make: object, message: str) -> None:
    """Nothing is simulated that could not stand anywhere."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
