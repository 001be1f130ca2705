"""This file is the simulator: streams that run through a site in virtual time, round by round, as the real stack's do.

A gateway's work, a direction of a link and an engine's steps are waited for; everything else passes at once. A round of a
stream: commit and features to the drafter, its step, marginals back, the tree to the target, its step, the commit back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from treewire.simulation.policies import Policy, PolicyName, RoundTimes
from treewire.simulation.recording import RecordedGeneration, Rounds
from treewire.simulation.servers import Agenda, Engine, Line, Stepped
from treewire.simulation.site import Site

MAX_STREAMS = 10_000
STAGES = ("draft", "verify", "gateway", "network")
_NOT_STEPPED = Stepped(0.0, 1)
_TOKEN_BYTES = 4
_NODE_BYTES = 8  # a token and its parent
_GUESS_BYTES = 8  # a token and its log-probability


@dataclass(frozen=True)
class Load:
    """`num_streams` streams at once, each of which begins its next generation as soon as one has ended, until `num_generations`
    have begun. They begin within the first `ramp_seconds`, at times drawn with `seed`.

    Generations are those of the recording in their order, again and again. ValueError with the limit on what cannot be.
    """

    num_streams: int
    num_generations: int
    ramp_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= MAX_STREAMS:
            raise ValueError(f"there are {self.num_streams} streams, from 1 to {MAX_STREAMS} are taken")
        if self.num_generations < self.num_streams:
            raise ValueError(f"{self.num_generations} generations are less than one for each of {self.num_streams} streams")
        if not 0.0 <= self.ramp_seconds < float("inf"):
            raise ValueError(f"the streams begin within {self.ramp_seconds} s, from 0 on is taken")


@dataclass
class Generation:
    """One generation under way. Times are virtual seconds; `num_tokens` were emitted; `new_tokens` the drafter has not seen.

    `waited` are seconds by what was waited for, rounds only.
    """

    recorded: RecordedGeneration
    begun_at: float
    gateway: _Gateway
    verify: Engine[Generation]
    draft: Engine[Generation]
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    new_tokens: int = 0
    num_chunks_left: int = 0
    budget: int = 0
    sent_at: float = 0.0
    arrived_at: float = 0.0
    draft_seconds: float | None = None
    queue_seconds: float = 0.0
    num_drafts: int = 0
    stepped: Stepped = _NOT_STEPPED
    waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def row(self) -> int:
        """The recording's row of the round that comes next."""
        return self.recorded.first_row + self.num_tokens - 1

    @property
    def is_over(self) -> bool:
        """True once every recorded token was emitted."""
        return self.num_tokens == self.recorded.num_tokens


@dataclass(frozen=True)
class _Gateway:
    """One gateway process with its links, each of two directions."""

    loop: Line
    to_verify: Line
    from_verify: Line
    to_draft: Line
    from_draft: Line

    @property
    def links(self) -> tuple[Line, ...]:
        """Every direction of every link."""
        return (self.to_verify, self.from_verify, self.to_draft, self.from_draft)


@dataclass(frozen=True)
class Outcome:
    """What came of a simulation: the generations in the order of their ends, and how long each part was busy."""

    generations: Sequence[Generation]
    seconds: float
    busy: dict[str, float]
    mean_batch_size: float
    num_steps: int
    num_draft_steps: int


class Simulation:
    """One policy under one load at one site. `run` once."""

    def __init__(self, site: Site, rounds: Rounds, policy: PolicyName, load: Load) -> None:
        self._site = site
        self._rounds = rounds
        self._recording = rounds.recording
        self._policy: Policy = policy.policy(rounds, site.prices)
        self._load = load
        self._agenda = Agenda()
        self._gateways = [_Gateway(*(Line() for _ in range(5))) for _ in range(site.num_gateways)]
        limits = site.limits
        self._verify = [
            Engine(self._agenda, site.verify, limits.max_sessions, limits.max_step_tokens, self._verified)
            for _ in range(site.num_verify_replicas)
        ]
        self._draft = [
            Engine(self._agenda, site.draft, limits.max_draft_batch_size, None, self._drafted)
            for _ in range(site.num_draft_replicas)
        ]
        self._num_begun = 0
        self._queued: deque[float] = deque()
        self._ended: list[Generation] = []
        self._guess_bytes = _GUESS_BYTES * self._recording.horizon * self._policy.width

    def run(self) -> Outcome:
        """Run until every generation has ended."""
        drawn = random.Random(self._load.seed)
        for _ in range(self._load.num_streams):
            self._agenda.at(drawn.uniform(0.0, self._load.ramp_seconds), self._arrive)
        self._agenda.run()
        seconds = max(self._agenda.now, 1e-12)
        gateway_loops = [gateway.loop for gateway in self._gateways]
        links = [link for gateway in self._gateways for link in gateway.links]
        return Outcome(
            generations=self._ended,
            seconds=seconds,
            busy={
                "draft": sum(engine.busy_seconds for engine in self._draft) / len(self._draft) / seconds,
                "verify": sum(engine.busy_seconds for engine in self._verify) / len(self._verify) / seconds,
                "gateway": sum(line.busy_seconds for line in gateway_loops) / len(gateway_loops) / seconds,
                "network": max(line.busy_seconds for line in links) / seconds,
            },
            mean_batch_size=sum(engine.num_items for engine in self._verify)
            / max(1, sum(engine.num_steps for engine in self._verify)),
            num_steps=sum(engine.num_steps for engine in self._verify),
            num_draft_steps=sum(engine.num_steps for engine in self._draft),
        )

    def _arrive(self) -> None:
        """The next generation arrives, unless all have."""
        if self._num_begun < self._load.num_generations:
            self._num_begun += 1
            self._queued.append(self._agenda.now)
            self._admit()

    def _admit(self) -> None:
        """Begin what waits for a session, as far as the target has room."""
        while self._queued:
            verify = min(self._verify, key=_num_sessions)
            if verify.num_sessions >= self._site.limits.max_sessions:
                return
            number = self._num_begun - len(self._queued)
            recorded = self._recording.generations[number % len(self._recording.generations)]
            draft = min(self._draft, key=_num_sessions)
            verify.num_sessions += 1
            draft.num_sessions += 1
            gateway = self._gateways[number % len(self._gateways)]
            self._begin(Generation(recorded, self._queued.popleft(), gateway, verify, draft))

    def _begin(self, generation: Generation) -> None:
        """Send the prompt to the target."""
        prompt, limits = generation.recorded.num_prompt_tokens, self._site.limits
        generation.new_tokens = prompt
        generation.num_chunks_left = -(-prompt // limits.prefill_chunk_tokens)
        done = generation.gateway.loop.done_at(self._agenda.now, self._site.gateway_seconds)
        arrival = self._to_verify(generation, done, _TOKEN_BYTES * prompt)
        self._agenda.at(arrival, partial(self._submit_chunk, generation))

    def _submit_chunk(self, generation: Generation) -> None:
        """The next chunk of the prompt; the last one is what is left."""
        size, prompt = self._site.limits.prefill_chunk_tokens, generation.recorded.num_prompt_tokens
        generation.num_chunks_left -= 1
        is_last = generation.num_chunks_left == 0
        generation.verify.submit(generation, prompt - size * ((prompt - 1) // size) if is_last else size)

    def _verified(self, generation: Generation, stepped: Stepped) -> None:
        """A step of the target has computed a chunk or a tree of this generation."""
        now, site = self._agenda.now, self._site
        if generation.num_chunks_left:
            self._submit_chunk(generation)
            return
        generation.stepped = stepped
        generation.queue_seconds = now - generation.arrived_at - stepped.seconds
        generation.waited["verify"] += now - generation.arrived_at
        num_accepted = self._num_accepted(generation)
        size = _TOKEN_BYTES * (num_accepted + 1) + site.feature_bytes * (num_accepted + 1)
        arrival = generation.gateway.from_verify.done_at(now, size / site.network.bytes_per_second)
        arrival += site.network.verify_seconds
        generation.waited["network"] += arrival - now
        self._agenda.at(arrival, partial(self._commit, generation, num_accepted))

    def _num_accepted(self, generation: Generation) -> int:
        """Drafted tokens that are accepted of the round's tree."""
        if not generation.budget:
            return 0
        return self._rounds.tree(generation.row, self._policy.width).num_accepted(generation.budget)

    def _commit(self, generation: Generation, num_accepted: int) -> None:
        """A commit is at the gateway: the first token, or a round's."""
        now = self._agenda.now
        done = generation.gateway.loop.done_at(now, self._site.gateway_seconds)
        if generation.num_tokens:
            self._learn(generation, num_accepted)
            generation.waited["gateway"] += done - now
        else:
            generation.first_token_at = done
            generation.waited = dict.fromkeys(STAGES, 0.0)
        gained = min(num_accepted + 1, generation.recorded.num_tokens - generation.num_tokens)
        generation.num_tokens += gained
        generation.new_tokens += gained
        if generation.is_over:
            generation.ended_at = done
            self._agenda.at(done, partial(self._end, generation))
            return
        generation.num_rounds += 1
        self._round(generation, done)

    def _round(self, generation: Generation, now: float) -> None:
        """A round begins: the drafter is asked, or the root alone is sent to the target."""
        generation.budget, generation.sent_at, generation.draft_seconds = 0, now, None
        if not self._policy.asks():
            self._send_tree(generation, now)
            return
        size = (_TOKEN_BYTES + self._site.feature_bytes) * generation.new_tokens
        network = self._site.network
        arrival = generation.gateway.to_draft.done_at(now, size / network.bytes_per_second) + network.draft_seconds
        generation.waited["network"] += arrival - now
        self._agenda.at(arrival, partial(self._submit_draft, generation))

    def _submit_draft(self, generation: Generation) -> None:
        generation.arrived_at = self._agenda.now
        num_tokens, generation.new_tokens = generation.new_tokens, 0
        generation.draft.submit(generation, num_tokens)

    def _drafted(self, generation: Generation, stepped: Stepped) -> None:
        """A step of the drafter has answered this generation."""
        now, network = self._agenda.now, self._site.network
        generation.waited["draft"] += now - generation.arrived_at
        sent = generation.gateway.from_draft.done_at(now, self._guess_bytes / network.bytes_per_second)
        generation.waited["network"] += sent + network.draft_seconds - now
        self._agenda.at(sent + network.draft_seconds, partial(self._plan, generation))

    def _plan(self, generation: Generation) -> None:
        """Marginals are at the gateway."""
        now = self._agenda.now
        generation.draft_seconds = now - generation.sent_at
        generation.num_drafts += 1
        generation.budget = self._policy.budget(generation.row, generation.recorded.num_tokens - generation.num_tokens)
        done = generation.gateway.loop.done_at(now, self._site.gateway_seconds)
        generation.waited["gateway"] += done - now
        self._send_tree(generation, done)

    def _send_tree(self, generation: Generation, now: float) -> None:
        generation.sent_at = now
        num_nodes = 1
        if generation.budget:
            num_nodes = self._rounds.tree(generation.row, self._policy.width).num_nodes(generation.budget)
        arrival = self._to_verify(generation, now, _NODE_BYTES * num_nodes)
        self._agenda.at(arrival, partial(self._submit_tree, generation, num_nodes))

    def _submit_tree(self, generation: Generation, num_nodes: int) -> None:
        generation.arrived_at = self._agenda.now
        generation.verify.submit(generation, num_nodes)

    def _to_verify(self, generation: Generation, now: float, num_bytes: int) -> float:
        """When a message that is sent then is at the target."""
        network = self._site.network
        arrival = generation.gateway.to_verify.done_at(now, num_bytes / network.bytes_per_second) + network.verify_seconds
        generation.waited["network"] += arrival - now
        return arrival

    def _learn(self, generation: Generation, num_accepted: int) -> None:
        stepped = generation.stepped
        times = RoundTimes(
            draft_seconds=generation.draft_seconds if generation.num_drafts > 1 else None,
            verify_seconds=self._agenda.now - generation.sent_at,
            queue_seconds=generation.queue_seconds,
            step_seconds=stepped.seconds,
            batch_size=stepped.batch_size,
            num_sessions=generation.verify.num_sessions,
        )
        self._policy.observe(generation.row, generation.budget, num_accepted, times)

    def _end(self, generation: Generation) -> None:
        """The last token was emitted: its place is free, and its stream begins the next generation."""
        generation.verify.num_sessions -= 1
        generation.draft.num_sessions -= 1
        self._ended.append(generation)
        self._arrive()
        self._admit()


def _num_sessions(engine: Engine[Generation]) -> int:
    return engine.num_sessions
