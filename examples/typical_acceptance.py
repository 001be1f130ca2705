"""Typical acceptance (Medusa; Cai et al. 2024) outside of the services: a caller that accepts by a rule of its own.

The session is opened with ACCEPTANCE_CALLER; the verify service scores trees and tells the likeliest tokens of each node, this
program decides which nodes to keep. Typical acceptance trades exactness for speed: it takes any draft that the target does not
find unlikely, so that the text is *not* a sample of the target's distribution.

    python examples/typical_acceptance.py --verify 127.0.0.1:50052 --draft 127.0.0.1:50051 --tokens 1,2,3 --max-tokens 40
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from treewire import wire
from treewire.core.build import build_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, DraftTree, Marginals
from treewire.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc

NUM_NODE_PROBABILITIES = 20


@dataclass(frozen=True)
class TypicalRule:
    """A draft is taken if its probability is above min(`floor`, `share` * exp(-entropy)): the flatter, the laxer."""

    floor: float = 0.09
    share: float = 0.3

    def takes(self, token_id: int, node: verify_pb2.NodeProbabilities) -> bool:
        """Whether this token may follow a node with these likeliest tokens; one that is not among them may not."""
        likely = dict(zip(node.token_ids, node.log_probs, strict=True))
        if token_id not in likely:
            return False
        entropy = -sum(math.exp(log_prob) * log_prob for log_prob in likely.values())
        return math.exp(likely[token_id]) > min(self.floor, self.share * math.exp(-entropy))

    def keep(self, tree: DraftTree, scored: verify_pb2.Scored) -> verify_pb2.Keep:
        """The longest path of typical tokens, and the target's own choice after it."""
        taken = {0}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent in taken and self.takes(tree.token_ids[node], scored.node_probabilities[parent]):
                taken.add(node)
        last = max(taken, key=lambda node: (tree.depths[node], -node))
        return verify_pb2.Keep(nodes=tree.path(last), next_token_id=scored.posterior[last])


class VerifyCaller:
    """A verify session whose caller accepts."""

    def __init__(self, call: grpc.aio.StreamStreamCall[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse]) -> None:
        self._call = call

    async def score(self, tree: DraftTree) -> verify_pb2.Scored:
        """What the target says to a tree."""
        await self._call.write(verify_pb2.VerifyRequest(tree=wire.tree_to_message(tree)))
        return await self.scored()

    async def scored(self) -> verify_pb2.Scored:
        """The next answer of the target."""
        response = await self._call.read()
        assert isinstance(response, verify_pb2.VerifyResponse), "the session ended"
        return response.scored

    async def keep(self, keep: verify_pb2.Keep) -> None:
        """Tell which nodes stay."""
        await self._call.write(verify_pb2.VerifyRequest(keep=keep))


@asynccontextmanager
async def verify_session(
    address: str, target: tree_pb2.Fingerprint, prompt: Sequence[int], sampling: Sampling
) -> AsyncIterator[VerifyCaller]:
    """A verify session opened with ACCEPTANCE_CALLER."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        try:
            opening = verify_pb2.VerifyOpen(
                protocol_version=wire.PROTOCOL_VERSION,
                target=target,
                prompt_token_ids=wire.token_ids_to_bytes(prompt),
                sampling=wire.sampling_to_message(sampling),
                accept=tree_pb2.ACCEPTANCE_CALLER,
                num_node_probabilities=NUM_NODE_PROBABILITIES,
            )
            await call.write(verify_pb2.VerifyRequest(open=opening))
            await call.read()
            yield VerifyCaller(call)
        finally:
            call.cancel()


@asynccontextmanager
async def draft_session(
    address: str, target: tree_pb2.Fingerprint, prompt: Sequence[int], sampling: Sampling
) -> AsyncIterator[grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]]:
    """A draft session for that target."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        try:
            opening = draft_pb2.DraftOpen(
                protocol_version=wire.PROTOCOL_VERSION,
                target=target,
                prompt_token_ids=wire.token_ids_to_bytes(prompt),
                sampling=wire.sampling_to_message(sampling),
                horizon=8,
                width=16,
            )
            await call.write(draft_pb2.DraftRequest(open=opening))
            await call.read()
            yield call
        finally:
            call.cancel()


async def proposed(
    call: grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse], commit: Commit, vocabulary_size: int
) -> Marginals:
    """The drafter's guess at what follows a commit."""
    await call.write(draft_pb2.DraftRequest(commit=wire.commit_to_message(commit)))
    blocks: list[tree_pb2.Marginals] = []
    while not blocks or not blocks[-1].last:
        response = await call.read()
        assert isinstance(response, draft_pb2.DraftResponse), "the session ended"
        blocks.append(response.marginals)
    return wire.marginals_from_messages(blocks, max_depths=64, max_width=256, vocabulary_size=vocabulary_size)


async def generate(
    verify_address: str,
    draft_address: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    budget: int = 16,
    rule: TypicalRule = TypicalRule(),
) -> tuple[list[int], int]:
    """At least `max_tokens` tokens after the prompt, and the number of rounds that they took."""
    async with grpc.aio.insecure_channel(verify_address) as channel:
        described = await verify_pb2_grpc.VerifyServiceStub(channel).GetTarget(verify_pb2.GetTargetRequest())
    target = described.limits.fingerprint
    output: list[int] = []
    num_rounds = 0
    async with (
        verify_session(verify_address, target, prompt, sampling) as verifying,
        draft_session(draft_address, target, prompt, sampling) as drafting,
    ):
        tree, scored = DraftTree.lone_root(prompt[-1]), await verifying.scored()
        while True:
            keep = rule.keep(tree, scored)
            await verifying.keep(keep)
            committed = (*(tree.token_ids[node] for node in keep.nodes[1:]), keep.next_token_id)
            output.extend(committed)
            if len(output) >= max_tokens:
                return output, num_rounds
            marginals = await proposed(drafting, Commit(committed, len(prompt) + len(output)), target.vocabulary_size)
            tree = build_tree(output[-1], marginals, budget).tree
            scored, num_rounds = await verifying.score(tree), num_rounds + 1


def main() -> None:
    """Run it against services that listen."""
    parser = argparse.ArgumentParser(description="Typical acceptance by a caller of the verify service.")
    parser.add_argument("--verify", default="127.0.0.1:50052", help="address of the verify service")
    parser.add_argument("--draft", default="127.0.0.1:50051", help="address of the draft service")
    parser.add_argument("--tokens", required=True, help="token ids of the prompt, with commas")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    prompt = [int(token_id) for token_id in arguments.tokens.split(",")]
    sampling = Sampling(temperature=arguments.temperature)
    running = generate(arguments.verify, arguments.draft, prompt, max_tokens=arguments.max_tokens, sampling=sampling)
    output, num_rounds = asyncio.run(running)
    print(f"{len(output)} tokens in {num_rounds} rounds: {output}")


if __name__ == "__main__":
    main()
