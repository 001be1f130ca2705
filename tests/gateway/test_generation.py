"""The loop asks the drafter before it emits, and not when the generation ends."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from gateway.generation import generate
from gateway.stopping import Stopping, StopRules
from gateway.tokenization import Tokenization
from treewire.core.build import BuiltTree, build_tree
from treewire.core.tree import Commit, Marginals


class Happenings(list[str]):
    """Both sessions and the policy, as one list of what happens in them."""

    def session(self) -> AbstractAsyncContextManager[Any]:
        """Either session."""
        return nullcontext(self)

    async def prefill(self) -> Commit:
        """The first token."""
        return Commit((5,), 2)

    async def ask(self, commit: Commit) -> None:
        """A commit reaches the drafter."""
        self.append(f"asked {commit.length}")

    async def propose(self) -> Marginals:
        """No guess."""
        self.append("taken")
        return Marginals.empty()

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        """A lone root."""
        return build_tree(commit.bonus_token_id, marginals, 0)

    async def verify(self, built: BuiltTree) -> Commit:
        """One more token."""
        self.append("verified")
        return Commit((6,), 3)


async def test_drafter_is_asked_before_the_emission_and_not_at_the_end() -> None:
    """Ask, emit, take the guesses, verify, emit the last: nobody drafts for a generation that has ended."""
    happenings = Happenings()
    stopping = Stopping(StopRules(max_tokens=2), Tokenization.simulated().decoder())
    async for emission in generate(happenings.session(), happenings.session(), happenings, stopping):
        happenings.append(f"emitted {emission.token_ids[0]}")
    assert happenings == ["asked 2", "emitted 5", "taken", "verified", "emitted 6"]
