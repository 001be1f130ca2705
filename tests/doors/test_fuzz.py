"""Random and mutated messages: every RPC refuses what is wrong with it, and lives."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.system.local_stack import MODEL, local_stack
from treewire import wire
from treewire.v1 import draft_pb2, generate_pb2, tree_pb2, verify_pb2
from verify_service.engines.simulated import SimulatedTarget

NUM_MESSAGES = 10_000
LONGEST_SECONDS = 400.0
NUM_CALLERS = 16
MESSAGES_PER_STREAM = 5
CALL_SECONDS = 20.0
FORBIDDEN = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")
PROMPT = wire.token_ids_to_bytes([300, 301, 302])
INTERESTING = (0, 1, -1, 2, 16, 255, 1023, 1024, 2**31 - 1, -(2**31))


def samples(kind: type[Message], fingerprint: tree_pb2.Fingerprint) -> list[Message]:
    """Valid messages of a kind, from which others are made."""
    sampling = tree_pb2.Sampling(temperature=1.0, seed=7, top_k=20)
    match kind:
        case generate_pb2.GenerateRequest:
            turn = generate_pb2.ChatMessage(role="user", content="Hi")
            return [
                generate_pb2.GenerateRequest(text="go on", max_tokens=3, budget=4),
                generate_pb2.GenerateRequest(chat=generate_pb2.Chat(messages=[turn]), max_tokens=2, stop=["x"]),
                generate_pb2.GenerateRequest(text="go on", max_tokens=3, regex="[a-z]{4}"),
                generate_pb2.GenerateRequest(tokens=generate_pb2.TokenIds(token_ids=PROMPT), sampling=sampling, max_tokens=2),
            ]
        case verify_pb2.VerifyRequest:
            opening = verify_pb2.VerifyOpen(
                protocol_version=wire.PROTOCOL_VERSION, target=fingerprint, prompt_token_ids=PROMPT, sampling=sampling
            )
            tree = tree_pb2.DraftTree(token_ids=[5, 6, 7], parents=[-1, 0, 0])
            structured = verify_pb2.VerifyOpen(grammar='root ::= "a" [b-z]{2}')
            structured.MergeFrom(opening)
            requests = [verify_pb2.VerifyRequest(open=opening), verify_pb2.VerifyRequest(tree=tree)]
            return [*requests, verify_pb2.VerifyRequest(open=structured)]
        case draft_pb2.DraftRequest:
            opening = draft_pb2.DraftOpen(
                protocol_version=wire.PROTOCOL_VERSION,
                target=fingerprint,
                prompt_token_ids=PROMPT,
                sampling=sampling,
                horizon=4,
                width=4,
            )
            commit = tree_pb2.Commit(token_ids=[9], length=4)
            return [draft_pb2.DraftRequest(open=opening), draft_pb2.DraftRequest(commit=commit)]
    return [kind()]


def random_value(field: FieldDescriptor, rng: random.Random) -> Any:
    """A value that the field can hold, likely at an edge."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = "".join(rng.choice("aé木🌳\0\n") for _ in range(rng.choice((0, 1, 3, 40))))
            return text if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(rng.choice((0, 3, 4, 8, 400)))
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((0.0, -1.0, 0.5, 1.0, 1e30, float("nan"), float("inf"), float("-inf")))
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice((0, 1, 7, 2**31))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 17))
    return rng.choice(INTERESTING)


def randomise(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set some fields, at random."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[random_value(field.message_type.fields_by_name["key"], rng)] = 1
        elif field.is_repeated and field.message_type is None:
            getattr(message, field.name).extend(random_value(field, rng) for _ in range(rng.randrange(4)))
        elif field.is_repeated:
            for _ in range(rng.randrange(3)):
                randomise(getattr(message, field.name).add(), rng, depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            randomise(getattr(message, field.name), rng, depth + 1)
        else:
            setattr(message, field.name, random_value(field, rng))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed, lost or added."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if changed:
                changed[at % len(changed)] = rng.randrange(256)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 9)))
            case 3:
                changed[at:at] = changed[: rng.randrange(1, 20)]
    return bytes(changed)


def fuzzed(kind: type[Message], valid: list[Message], rng: random.Random) -> bytes:
    """A message: noise, a random one, a valid one with random fields, or one with mutated bytes; sometimes a valid one."""
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 10, 300)))
        case 1 | 2:
            message = kind()
            randomise(message, rng)
            return message.SerializeToString()
        case 3 | 4:
            message = kind()
            message.CopyFrom(rng.choice(valid))
            randomise(message, rng)
            return message.SerializeToString()
        case 5 | 6:
            return mutated(rng.choice(valid).SerializeToString(), rng)
    return rng.choice(valid).SerializeToString()


async def outcome(call: Callable[[], AsyncIterator[bytes]]) -> grpc.StatusCode:
    """How a call ended."""
    try:
        async for _ in call():
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def bombard(
    start: Callable[[list[bytes]], AsyncIterator[bytes]], batches: Iterator[list[bytes]]
) -> Counter[grpc.StatusCode]:
    """How the calls ended, each made of one batch of messages; many at a time, within the time there is."""
    outcomes: Counter[grpc.StatusCode] = Counter()
    ends = time.monotonic() + LONGEST_SECONDS

    async def caller() -> None:
        for batch in batches:
            outcomes[await outcome(lambda batch=batch: start(batch))] += 1
            if time.monotonic() > ends:
                return

    await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
    assert next(batches, None) is None, f"only {sum(outcomes.values())} calls within {LONGEST_SECONDS:g} s"
    return outcomes


RPCS = [
    ("gateway", "GenerateService/Generate", generate_pb2.GenerateRequest, "unary_stream"),
    ("gateway", "GenerateService/GetModel", generate_pb2.GetModelRequest, "unary_unary"),
    ("verify", "VerifyService/Verify", verify_pb2.VerifyRequest, "stream_stream"),
    ("verify", "VerifyService/GetTarget", verify_pb2.GetTargetRequest, "unary_unary"),
    ("draft", "DraftService/Draft", draft_pb2.DraftRequest, "stream_stream"),
    ("draft", "DraftService/GetDrafter", draft_pb2.GetDrafterRequest, "unary_unary"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("service", "path", "kind", "shape"), RPCS, ids=[rpc[1] for rpc in RPCS])
async def test_no_message_brings_a_service_down(service: str, path: str, kind: type[Message], shape: str) -> None:
    """Ten thousand messages: none ends in INTERNAL, UNKNOWN or a deadline, and afterwards a generation is as before."""
    rng = random.Random(f"{path} 20261130")
    target = SimulatedTarget(MODEL, max_context=256, kv_tokens=1 << 15)
    limits = {"max_output_tokens": 8, "max_tokens": 4, "max_budget": 16, "max_running": NUM_CALLERS}
    async with local_stack(target, **limits) as stack, stack.client() as client:
        before = await client.generate("go on", max_tokens=8)
        valid = samples(kind, stack.gateway.generations.serving.upstreams.target)
        address = {
            "gateway": stack.address,
            "verify": stack.verify_running.address,
            "draft": "" if stack.draft_running is None else stack.draft_running.address,
        }[service]
        size = MESSAGES_PER_STREAM if shape == "stream_stream" else 1
        messages = (fuzzed(kind, valid, rng) for _ in range(NUM_MESSAGES))
        batches = iter(lambda: list(islice(messages, size)), [])
        async with grpc.aio.insecure_channel(address) as channel:
            outcomes = await bombard(lambda batch: answers(channel, shape, path, batch), batches)
        assert grpc.StatusCode.DEADLINE_EXCEEDED not in outcomes
        counted = {"gateway": stack.gateway, "verify": stack.verify, "draft": stack.draft}[service]
        value = counted.metrics.registry.get_sample_value
        for code in FORBIDDEN:  # as the service ended them: a client whose stream ends while it writes says INTERNAL of itself
            assert value("treewire_rpcs_total", {"method": f"/treewire.v1.{path}", "code": code}) is None
        assert (await client.generate("go on", max_tokens=8)).token_ids == before.token_ids
        await asyncio.sleep(0.2)
        assert stack.num_sessions == (0, 0)


async def answers(channel: grpc.aio.Channel, shape: str, path: str, batch: list[bytes]) -> AsyncIterator[bytes]:
    """What a call answers to these messages."""
    method = getattr(channel, shape)(f"/treewire.v1.{path}")
    if shape == "unary_unary":
        yield await method(batch[0], timeout=CALL_SECONDS)
        return
    argument = batch[0] if shape == "unary_stream" else iter(batch)
    async for answer in method(argument, timeout=CALL_SECONDS):
        yield answer
