"""This file is a target that outlives its replicas: a generation's session, opened again elsewhere when it is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import Enum

import stamina

from gateway.replicas import Replica, Replicas
from gateway.sessions import SessionRequest, VerifySession
from treewire import wire
from treewire.core.build import BuiltTree
from treewire.core.tree import Commit
from treewire.costs import TargetCosts
from treewire.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable
from treewire.runtime.logging import get_logger
from treewire.v1 import verify_pb2

_PASSING = (Unavailable, InternalError, DeadlineExceeded, Overloaded)
"""What another replica, or the same one later, may well not say."""
_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0

_log = get_logger()

OpenSession = Callable[[Replica, SessionRequest], AbstractAsyncContextManager[VerifySession]]


class Reason(Enum):
    """Why a generation leaves its replica."""

    LOST = "lost"
    OVERLOADED = "overloaded"
    DRAINING = "draining"


@dataclass(frozen=True)
class FailoverPatience:
    """How long a generation looks for a replica: failed tries, seconds without one, seconds until one has room.

    `admission_seconds` is how long a generation that has no token yet waits for room.
    """

    num_attempts: int
    outage_seconds: float
    preempted_seconds: float
    admission_seconds: float


@dataclass
class Interruption:
    """One time without a session: what was tried, and when it has lasted too long."""

    patience: FailoverPatience
    overloaded_seconds: float
    tried: set[Replica] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)
    num_failures: int = 0

    @property
    def remaining_seconds(self) -> float:
        """What is left of the time without any replica."""
        return max(0.0, self.patience.outage_seconds - (time.monotonic() - self.started))

    def is_worth_another_try(self, error: Exception) -> bool:
        """Counts the failure of a try. False if it is no passing one, or the patience is at its end."""
        if isinstance(error, Overloaded):
            return time.monotonic() - self.started < self.overloaded_seconds
        self.num_failures += 1
        return isinstance(error, _PASSING) and self.num_failures < self.patience.num_attempts and self.remaining_seconds > 0


class ResilientVerifySession:
    """A session on whichever replica of the target serves. Losing one costs time, never a token.

    The prompt and what was committed are opened as a session on another replica: since the target's choice is a function of
    the position, that prefill's commit is what the round would have begun with. A replica that drains is left between two
    rounds; one without room is left, and the generation is replayed when there is room.
    """

    def __init__(
        self,
        replicas: Replicas,
        open_session: OpenSession,
        request: SessionRequest,
        patience: FailoverPatience,
        on_failover: Callable[[Reason], None],
    ) -> None:
        self._replicas = replicas
        self._open_session = open_session
        self._request = request
        self._patience = patience
        self._on_failover = on_failover
        self._tokens = list(request.prompt)
        self._lifetime = AsyncExitStack()
        self._open: tuple[Replica, VerifySession] | None = None
        self.scored: verify_pb2.Scored | None = None

    @property
    def host_seconds(self) -> Mapping[str, float]:
        """Seconds of the last round that this end of the session took, by stage; none while on no replica."""
        return {} if self._open is None else self._open[1].host_seconds

    @property
    def costs(self) -> TargetCosts | None:
        """Those of the replica that the session is on; None while it is on none."""
        return None if self._open is None else self._open[1].costs

    async def __aenter__(self) -> ResilientVerifySession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def prefill(self) -> Commit:
        """The first token after the prompt."""
        return await self._replayed(Interruption(self._patience, self._patience.admission_seconds))

    async def verify(self, built: BuiltTree) -> Commit:
        """What the target accepts of the tree, and its bonus token; after a loss its next token. `scored` holds the answer."""
        assert self._open is not None, "a prefill comes before a tree"
        replica, session = self._open
        if replica.is_draining and self._replicas.has_other(replica):
            return await self._moved(replica, Reason.DRAINING, "the replica is draining")
        try:
            commit = await session.verify(built)
        except _PASSING as error:
            reason = Reason.OVERLOADED if isinstance(error, Overloaded) else Reason.LOST
            return await self._moved(replica, reason, error.message)
        self.scored = session.scored
        self._tokens.extend(commit.token_ids)
        return commit

    async def _moved(self, replica: Replica, reason: Reason, message: str) -> Commit:
        """The next token, from another replica if there is one. The tree stays unscored: of it only the root is accepted."""
        self._on_failover(reason)
        _log.warning(
            "verify replica left",
            request_id=self._request.request_id,
            address=replica.address,
            why=reason.value,
            reason=message,
            num_committed=len(self._tokens),
        )
        await self._close()
        commit = await self._replayed(Interruption(self._patience, self._patience.preempted_seconds, {replica}))
        self.scored = verify_pb2.Scored(
            posterior=commit.token_ids, accepted_nodes=[0], commit=wire.commit_to_message(commit), batch_size=1
        )
        return commit

    async def _replayed(self, interruption: Interruption) -> Commit:
        """The token after all that is committed, as soon as a replica gives it. Raises what the last try raised."""
        async for attempt in stamina.retry_context(
            on=interruption.is_worth_another_try,
            attempts=None,
            timeout=None,
            wait_initial=_FIRST_WAIT_SECONDS,
            wait_max=_LONGEST_WAIT_SECONDS,
            wait_jitter=_FIRST_WAIT_SECONDS,
        ):
            with attempt:
                await self._replicas.wait_available(interruption.remaining_seconds)
                return await self._try(interruption)
        raise AssertionError("retrying ends with a commit or an error")

    async def _try(self, interruption: Interruption) -> Commit:
        replica = self._replicas.choose(self._tokens, avoid=interruption.tried)
        interruption.tried.add(replica)
        request = replace(
            self._request,
            prompt=tuple(self._tokens),
            num_output_tokens=self._request.num_output_tokens + len(self._tokens) - len(self._request.prompt),
        )
        async with AsyncExitStack() as lifetime:
            lifetime.enter_context(replica.session())
            session = await lifetime.enter_async_context(self._open_session(replica, request))
            commit = await session.prefill()
            self._lifetime = lifetime.pop_all()
        self._open = (replica, session)
        self._tokens.extend(commit.token_ids)
        return commit

    async def _close(self) -> None:
        self._open = None
        await self._lifetime.aclose()
