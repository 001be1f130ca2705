"""This file is how rounds are recorded: a running stack decodes plainly while its drafter proposes at every position.

The target's output does not depend on the drafter, so that one recording says what any tree would have been accepted of. The
sessions are the gateway's own, the services those that serve.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from treewire import __version__
from treewire.client import AsyncClient
from treewire.core.budget import PriceTable, StepPrice
from treewire.core.build import build_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals
from treewire.runtime.channel import open_channel
from treewire.simulation.drafter_price import draft_prices
from treewire.simulation.recording import NOT_PROPOSED, MeasuredMachine, RecordedGeneration, Recording, RecordingError
from treewire.stack import ANY_PORT_ADDRESS, Service, Stack, StackOptions
from treewire.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

KEPT_WIDTH = 16
_REQUEST_ID = "recording"
_FEATURE_BYTES = 64 * 2**20
_PATIENCE_SECONDS = 120.0
_NUM_GATEWAY_PROMPTS = 4
_GATEWAY_BUDGET = 8


class StackAddresses(NamedTuple):
    """Where the three services of a stack listen, host:port."""

    gateway: str
    draft: str
    verify: str


class Names(NamedTuple):
    """What was recorded."""

    target: str
    drafter: str
    dtype: str


@dataclass(frozen=True)
class Observed:
    """One generation as it was recorded, and what its rounds took: the engine's steps, the target's round trips beside them,
    and the drafter's whole round trips, the first of which takes in the prompt."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    proposals: tuple[Marginals, ...]
    step_seconds: tuple[float, ...]
    verify_wire_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]


async def record_stack(
    options: StackOptions,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    started: Callable[[StackOptions], AbstractAsyncContextManager[Stack]],
    on_recorded: Callable[[int], None] = lambda num_tokens: None,
) -> Recording:
    """Start a stack, record the answers to what a user says, and measure the machine. The drafter's steps are measured first,
    on the idle machine, on an engine like the service's own."""
    from draft_service.__main__ import build_engine
    from draft_service.settings import DraftSettings
    from gateway.tokenization import Tokenization
    from treewire.weights import default_cache_dir, resolve

    flags = options.draft_flags(ANY_PORT_ADDRESS)
    settings = {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    prices = draft_prices(build_engine(DraftSettings.model_validate(settings)))
    tokenization = Tokenization.from_directory(resolve(options.target, cache_dir=default_cache_dir(), text_only=True))

    def encode(prompt: str) -> tuple[int, ...]:
        return tuple(tokenization.encode_chat([{"role": "user", "content": prompt}]))

    async with started(options) as stack:
        at = stack.addresses
        return await record(
            StackAddresses(at[Service.GATEWAY], at[Service.DRAFT], at[Service.VERIFY]),
            prompts,
            encode,
            names=Names(options.target, options.chosen_drafter, options.dtype),
            max_tokens=max_tokens,
            drafter_prices=prices,
            on_recorded=on_recorded,
        )


class Recorder:
    """Records generations on the services of a stack, one after the other, greedily."""

    def __init__(self, verify: grpc.aio.Channel, draft: grpc.aio.Channel, *, max_tokens: int) -> None:
        self._verify = verify
        self._draft = draft
        self._max_tokens = max_tokens

    async def limits(self) -> tuple[verify_pb2.VerifyLimits, draft_pb2.DraftLimits]:
        """What the target and the drafter say of themselves."""
        target = await verify_pb2_grpc.VerifyServiceStub(self._verify).GetTarget(verify_pb2.GetTargetRequest())
        drafter = await draft_pb2_grpc.DraftServiceStub(self._draft).GetDrafter(draft_pb2.GetDrafterRequest())
        return target.limits, drafter.limits

    async def record(self, prompt: tuple[int, ...]) -> Observed:
        """Decode one answer; the drafter is asked after every token but the last."""
        from gateway.features import FeatureLog
        from gateway.sessions import SessionRequest, open_draft_stream, verify_session
        from treewire.costs import TargetCosts

        target, drafter = await self.limits()
        request = SessionRequest(
            prompt,
            Sampling(),
            target.fingerprint,
            _REQUEST_ID,
            trees_aim_at_noise=False,
            takes_conditional=False,  # a recording keeps rows of depths alone
            features=FeatureLog(_FEATURE_BYTES) if drafter.needs_features else None,
        )
        patience = {"prefill_timeout_seconds": _PATIENCE_SECONDS, "round_timeout_seconds": _PATIENCE_SECONDS}
        async with verify_session(self._verify, request, TargetCosts(), **patience) as verifying:
            commit = await verifying.prefill()
            drafting = await open_draft_stream(
                self._draft,
                request,
                prompt,
                horizon=drafter.horizon,
                width=drafter.width,
                on_limits=lambda limits: None,
            )
            try:
                tokens, proposals = [commit.bonus_token_id], []
                step_seconds, wire_seconds, draft_seconds = [], [], []
                while len(tokens) < self._max_tokens and tokens[-1] not in target.end_token_ids:
                    started = time.perf_counter()
                    proposals.append(await drafting.propose(commit))
                    drafted = time.perf_counter()
                    commit = await verifying.verify(build_tree(commit.bonus_token_id, Marginals.empty(), 0))
                    assert verifying.scored is not None, "a tree was verified"
                    step_seconds.append(verifying.scored.step_seconds)
                    wire_seconds.append(time.perf_counter() - drafted - step_seconds[-1])
                    draft_seconds.append(drafted - started)
                    tokens.extend(commit.token_ids)
            finally:
                drafting.call.cancel()
        times = (tuple(step_seconds), tuple(wire_seconds), tuple(draft_seconds))
        return Observed(len(prompt), tuple(tokens), tuple(proposals), *times)


def rows_of(observed: Observed, *, horizon: int, max_tokens: int) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Log-probs [rows, horizon, KEPT_WIDTH] and choices [rows, horizon] of one generation.

    Where the output was ended by its length, no tree is deeper than tokens can still be emitted, as in the gateway.
    """
    tokens = observed.token_ids
    log_probs = np.full((len(tokens) - 1, horizon, KEPT_WIDTH), -np.inf, np.float16)
    choices = np.full((len(tokens) - 1, horizon), NOT_PROPOSED, np.uint8)
    for row, marginals in enumerate(observed.proposals):
        depths = min(marginals.num_depths, horizon, max_tokens - row - 2)
        width = min(marginals.width, KEPT_WIDTH)
        log_probs[row, :depths, :width] = np.minimum(marginals.log_probs[:depths, :width], 0.0)
        for depth in range(min(depths, len(tokens) - row - 1)):
            ranks = np.flatnonzero(marginals.token_ids[depth, :width] == tokens[row + 1 + depth])
            if len(ranks):
                choices[row, depth] = ranks[0]
    return log_probs, choices


def joined(
    generations: Sequence[Observed], names: Names, *, horizon: int, max_tokens: int, machine: MeasuredMachine
) -> Recording:
    """The recording of these generations."""
    rows = [rows_of(observed, horizon=horizon, max_tokens=max_tokens) for observed in generations]
    recorded, first_row = [], 0
    for observed in generations:
        recorded.append(RecordedGeneration(observed.num_prompt_tokens, len(observed.token_ids), first_row))
        first_row += len(observed.token_ids) - 1
    return Recording(
        target=names.target,
        drafter=names.drafter,
        generations=tuple(recorded),
        log_probs=np.concatenate([log_probs for log_probs, _ in rows]),
        choices=np.concatenate([choices for _, choices in rows]),
        machine=machine,
        provenance={
            "treewire": __version__,
            "recorded_at": datetime.now(UTC).date().isoformat(),
            "dtype": names.dtype,
            "max_tokens": max_tokens,
        },
    )


async def record(
    addresses: StackAddresses,
    prompts: Sequence[str],
    encode: Callable[[str], tuple[int, ...]],
    *,
    names: Names,
    max_tokens: int,
    drafter_prices: Sequence[StepPrice],
    on_recorded: Callable[[int], None] = lambda num_tokens: None,
) -> Recording:
    """Record the answers to the prompts, and what rounds cost on this machine. `on_recorded` is told the tokens of each answer.

    Prices of the target are those that its service publishes; of one that measures none, the step that was seen. Prices of
    the drafter are given, since its service publishes none; without them its round trips stand for its steps.
    """
    async with open_channel(addresses.verify) as verify, open_channel(addresses.draft) as draft:
        recorder = Recorder(verify, draft, max_tokens=max_tokens)
        limits, drafting = await recorder.limits()
        generations = []
        for prompt in prompts:
            generations.append(await recorder.record(encode(prompt)))
            on_recorded(len(generations[-1].token_ids))
    gateway_seconds = await _gateway_seconds(addresses.gateway, prompts[:_NUM_GATEWAY_PROMPTS], max_tokens)
    description = f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}, {names.dtype}"
    machine = measured_machine(generations, limits.prices, drafter_prices, gateway_seconds, description)
    return joined(generations, names, horizon=drafting.horizon, max_tokens=max_tokens, machine=machine)


def measured_machine(
    generations: Sequence[Observed],
    verify_prices: Sequence[verify_pb2.StepPrice],
    drafter_prices: Sequence[StepPrice],
    gateway_seconds: float,
    description: str,
) -> MeasuredMachine:
    """What was measured, as medians over rounds."""
    step_seconds = [seconds for observed in generations for seconds in observed.step_seconds]
    verify_wire = [seconds for observed in generations for seconds in observed.verify_wire_seconds]
    drafts = [seconds for observed in generations for seconds in observed.draft_seconds[1:]]
    if not drafts:
        raise RecordingError("every answer ended with its first tokens, there are no rounds to measure")
    prices = tuple(StepPrice(price.num_nodes, price.batch_size, price.seconds) for price in verify_prices)
    draft = tuple(drafter_prices) or (StepPrice(1, 1, median(drafts)),)
    return MeasuredMachine(
        description=description,
        verify=prices or (StepPrice(1, 1, median(step_seconds)),),
        draft=draft,
        verify_wire_seconds=max(0.0, median(verify_wire)),
        draft_wire_seconds=max(0.0, median(drafts) - PriceTable(draft).seconds(1, 1)) if drafter_prices else 0.0,
        gateway_seconds=gateway_seconds,
    )


async def _gateway_seconds(address: str, prompts: Sequence[str], max_tokens: int) -> float:
    """What the gateway does for one of the two messages of a round: the rounds' time that is in none of the services."""
    seconds, rounds = 0.0, 0
    async with AsyncClient(address) as client:
        for prompt in prompts:
            statistics = (await client.generate(prompt, budget=_GATEWAY_BUDGET, max_tokens=max_tokens)).statistics
            served = statistics.stage_seconds.get("draft", 0.0) + statistics.stage_seconds.get("verify", 0.0)
            seconds += statistics.total_seconds - statistics.ttft_seconds - served
            rounds += statistics.rounds
    return max(0.0, seconds / (2 * max(1, rounds)))
