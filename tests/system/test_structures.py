"""Outputs that must match a structure: the target's own under that condition, whatever drafts, whatever rule accepts."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.doors.eventually import eventually
from tests.system.local_stack import MODEL, LocalStack, local_stack
from treewire import Sampling
from treewire.core.simulated import Prefix
from treewire.errors import InvalidRequest, Unsupported
from treewire.types import Acceptance, Generation, Request
from treewire.v1 import generate_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
REGEX = r"(the|of|and)( [a-z]{1,8}){2,6}\."
GRAMMAR = 'root ::= leaf | "<" leaf ", " leaf ">"\nleaf ::= "(" [a-z]{1,8} " tree"{0,3} ")"'
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["oak", "ash", "木"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "site": {
            "type": "object",
            "properties": {"wet": {"type": "boolean"}, "name": {"type": "string", "maxLength": 12}},
            "required": ["wet", "name"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "ages", "site"],
    "additionalProperties": False,
}
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=20, seed=6)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """One stack for all, since the compiler's process takes its time to start."""
    async with local_stack(verify={"structure_compile_seconds": 2.0}) as running:
        yield running


async def generate(stack: LocalStack, **options: Any) -> Generation:
    """One generation of a prompt."""
    async with stack.client() as client:
        return await client.generate("grow a tree", **{"max_tokens": 120, **options})


def check_schema(text: str) -> None:
    """The text is JSON of SCHEMA."""
    value = json.loads(text)
    assert list(value) == ["kind", "ages", "site"]
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    assert 1 <= len(value["ages"]) <= 3
    assert all(isinstance(age, int) and 0 <= age <= 99 for age in value["ages"])
    assert list(value["site"]) == ["wet", "name"]
    assert isinstance(value["site"]["wet"], bool)
    assert len(value["site"]["name"]) <= 12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "cut"])
async def test_16_17_18_outputs_match_and_end_whatever_the_tree(stack: LocalStack, sampling: Sampling) -> None:
    """The same tokens with lone roots, chains and trees, several of them in a round; the end is the structure's."""
    structures: list[dict[str, Any]] = [{"regex": REGEX}, {"grammar": GRAMMAR}, {"json_schema": SCHEMA}]
    for structure in structures:
        shapes: list[dict[str, int]] = [{"budget": 0}, {"budget": 8, "width": 1}, {"budget": 24}]
        outputs = [await generate(stack, sampling=sampling, **structure, **shape) for shape in shapes]
        assert len({output.token_ids for output in outputs}) == 1
        output = outputs[0]
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == MODEL.end_token_id
        if "regex" in structure:
            assert re.fullmatch(REGEX, output.text)
        elif "grammar" in structure:
            leaf = r"\([a-z]{1,8}( tree){0,3}\)"
            assert re.fullmatch(f"{leaf}|<{leaf}, {leaf}>", output.text)
        else:
            check_schema(output.text)
    await eventually(lambda: stack.num_sessions == (0, 0))


@pytest.mark.parametrize("width", [1, 3])
async def test_hybrid_acceptance_keeps_to_the_structure(stack: LocalStack, width: int) -> None:
    """Forbidden drawn nodes are rejected ones: other seeds, other outputs, all of them matching."""
    options = {"accept": Acceptance.HYBRID, "hybrid_width": width, "budget": 12, "regex": REGEX}
    outputs = [await generate(stack, sampling=Sampling(temperature=1.0, seed=seed), **options) for seed in range(6)]
    assert all(re.fullmatch(REGEX, output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 3


async def test_forbidden_nodes_are_not_computed(stack: LocalStack) -> None:
    """The target computes what the structure leaves, no grafts among so many choices; log-probs are unchanged ones."""
    await generate(stack, regex="[0-9A-Z]{8}", max_tokens=1)  # the prompt is known, but for its last token
    before = stack.target.positions_computed
    output = await generate(stack, regex="[0-9A-Z]{8}", budget=16, num_log_probs=0)
    computed = stack.target.positions_computed - before
    assert output.statistics.draft_tokens > 20
    assert 1 + output.statistics.rounds <= computed < 1 + output.statistics.rounds + output.statistics.draft_tokens / 2
    assert re.fullmatch("[0-9A-Z]{8}", output.text)
    assert max(entry.log_prob for entry in output.log_probs[:-1]) < -1  # digits were unlikely, and are told so


async def test_greedy_output_is_the_likeliest_allowed_token_at_every_place(stack: LocalStack) -> None:
    """Against the model itself: of the tokens that may follow, here four words, each is the one with the highest logit."""
    words = [" tree", " branch", " leaf", " root"]
    output = await generate(stack, regex=f"({'|'.join(words)}){{10}}", budget=16)
    tokenization = stack.gateway.generations.serving.tokenization
    allowed = [tokenization.encode(word, False)[0] for word in words]
    prompt = tokenization.encode_chat([{"role": "user", "content": "grow a tree"}])
    prefix = Prefix.of(prompt)
    for token_id in output.token_ids[:10]:
        (logits,) = MODEL.logits([prefix])
        assert token_id == max(allowed, key=lambda each: logits[each]) or len(tokenization.piece(token_id)) < 3
        prefix = prefix.extend([token_id])


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"regex": "["}, "Unclosed"),
        ({"regex": "a{2,1}"}, "Lower bound is larger"),
        ({"json_schema": "{"}, "parse JSON"),
        ({"json_schema": {"type": "nonsense"}}, "Unsupported type"),
        ({"json_schema": "[1]"}, "chema"),
        ({"grammar": "tree ::= leaf"}, "root"),
        ({"regex": "a" * 70_000}, "70,000 characters long, at most 65,536 are taken"),
        ({"grammar": ""}, "is empty"),
    ],
)
async def test_structures_that_cannot_be_compiled_are_refused_by_name(
    stack: LocalStack, structure: dict[str, Any], reason: str
) -> None:
    """INVALID_ARGUMENT with the field and the reason, the second time at once, and nothing is computed."""
    (field,) = structure
    before = stack.target.positions_computed
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            await generate(stack, **structure)
        assert caught.value.metadata["field"] == field
        assert caught.value.message.startswith(field)
    assert stack.target.positions_computed == before
    await eventually(lambda: stack.num_sessions == (0, 0))


async def test_what_hangs_the_compiler_is_given_up_and_others_go_on(stack: LocalStack) -> None:
    """A schema nested beyond reason is refused after the time limit; meanwhile a compiled structure is served."""
    hostile = '{"items":' * 3000 + "{}" + "}" * 3000
    assert (await generate(stack, regex="[0-9]{3} trees")).text.endswith("trees")
    with pytest.raises(InvalidRequest, match="json_schema"):
        await generate(stack, json_schema=hostile)
    assert (await generate(stack, regex="[0-9]{3} trees")).text.endswith("trees")
    assert (await generate(stack, regex="[0-9]{3} roots")).text.endswith("roots")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"ignore_end": True}, "ignore_end"), ({"sampling": Sampling(min_tokens=3)}, "min_tokens")],
)
async def test_options_that_contradict_a_structure_are_refused(stack: LocalStack, options: dict[str, Any], named: str) -> None:
    """Both would go on behind the end."""
    with pytest.raises(Unsupported, match=named):
        await generate(stack, regex="a", **options)


async def test_max_tokens_cuts_and_penalties_and_stops_apply(stack: LocalStack) -> None:
    """Other options work within the structure; what has no room ends as a beginning of a match."""
    cut = await generate(stack, regex="( tree| leaf){50}", max_tokens=7)
    free = await generate(stack, regex="( tree| leaf){30}")
    biased = await generate(
        stack,
        regex="( tree| leaf){30}",
        sampling=Sampling(logit_bias={free.token_ids[0]: -100.0, free.token_ids[1]: -100.0}),
    )
    stopped = await generate(stack, regex="( tree| leaf){30}", stop=["leaf"])
    assert cut.finish_reason == "length"
    assert re.fullmatch("( tree| leaf){50}", cut.text) is None
    assert biased.token_ids[:2] != free.token_ids[:2]
    assert re.fullmatch("( tree| leaf){30}", biased.text)
    assert "leaf" not in stopped.text


async def test_resumed_generation_goes_on_in_the_structure(stack: LocalStack) -> None:
    """What was delivered is followed again from the start; what does not match it is refused."""
    async with stack.client() as client:
        whole = await generate(stack, json_schema=SCHEMA)
        for done in (1, 7, len(whole.token_ids) - 1):
            message = Request(
                "grow a tree", json_schema=SCHEMA, max_tokens=120, sampling=Sampling(seed=whole.seed)
            ).to_message()
            message.delivered.token_ids = b"".join(each.to_bytes(4, "little") for each in whole.token_ids[:done])
            assert await rest(client.address, message) == whole.token_ids[done:]
        message.delivered.token_ids = (300).to_bytes(4, "little")
        with pytest.raises(InvalidRequest, match="token 300 does not match the structure"):
            await rest(client.address, message)


async def rest(address: str, message: object) -> tuple[int, ...]:
    """The tokens of a stream."""
    import grpc

    from treewire.errors import from_rpc_error

    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answers = generate_pb2_grpc.GenerateServiceStub(channel).Generate(message)
            return tuple([token_id async for answer in answers for token_id in answer.chunk.token_ids])
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
