"""This file is the loop: how a generation comes about, round by round. Timing, metrics and retries wrap it from outside."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.stopping import Emission, Stopping
from treewire.core.build import BuiltTree
from treewire.core.tree import Commit, Marginals


class Verifying(Protocol):
    """An open session of the verify service."""

    async def prefill(self) -> Commit:
        """The first token after the prompt."""

    async def verify(self, built: BuiltTree) -> Commit:
        """What the target accepts of a tree, and its bonus token."""


class Drafting(Protocol):
    """A session of the draft service. Losing it is not an error."""

    async def ask(self, commit: Commit) -> None:
        """Have guesses made at what follows the commit; never waits for them."""

    async def propose(self) -> Marginals:
        """The guesses that were asked for; empty without a drafter."""


class Policy(Protocol):
    """How trees are chosen."""

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        """The round's tree."""


async def generate(
    verify_session: AbstractAsyncContextManager[Verifying],
    draft_session: AbstractAsyncContextManager[Drafting],
    policy: Policy,
    stopping: Stopping,
) -> AsyncGenerator[Emission, None]:
    """One generation. Ends after the emission that has a finish reason; leaving it early ends both sessions."""
    async with verify_session as verifying, draft_session as drafting:
        commit = await verifying.prefill()
        while (emission := stopping.admit(commit)).finish_reason is None:
            await drafting.ask(commit)  # the drafter is at work before anything is emitted
            yield emission
            tree = policy.build(commit, await drafting.propose())
            commit = await verifying.verify(tree)
        yield emission
