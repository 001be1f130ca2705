"""What a request becomes on the wire, and what is refused before it gets there."""

from __future__ import annotations

import struct

import pytest

from treewire import Sampling, errors
from treewire.errors import InvalidRequest
from treewire.types import Request
from treewire.v1 import generate_pb2, tree_pb2


def test_a_prompt_is_what_a_user_says():
    """A plain prompt is one user message, after the system's if there is one."""
    message = Request("Hi", system="Be brief").to_message()
    assert [(turn.role, turn.content) for turn in message.chat.messages] == [("system", "Be brief"), ("user", "Hi")]
    assert [turn.role for turn in Request("Hi").to_message().chat.messages] == ["user"]


def test_an_empty_input_is_still_an_input():
    """Empty text and no tokens reach the server, which says what it thinks of them."""
    assert Request(text="").to_message().WhichOneof("input") == "text"
    assert Request(token_ids=[]).to_message().WhichOneof("input") == "tokens"
    assert Request("").to_message().chat.messages[0].content == ""


def test_token_ids_are_int32_little_endian():
    """Ids travel as bytes."""
    assert Request(token_ids=[1, 2**31 - 1]).to_message().tokens.token_ids == struct.pack("<2i", 1, 2**31 - 1)


def test_only_what_is_given_is_set():
    """Zero is a value, None is the server's default: the two differ on the wire."""
    bare = Request("Hi").to_message()
    assert not bare.HasField("sampling")
    assert not bare.HasField("max_tokens")
    assert not bare.HasField("budget")
    full = Request("Hi", max_tokens=0, budget=0, sampling=Sampling(temperature=0.0, seed=2**64 - 1, logit_bias={3: -1.5}))
    assert full.to_message().HasField("budget")
    assert full.to_message().HasField("max_tokens")
    assert full.to_message().sampling == tree_pb2.Sampling(temperature=0.0, seed=2**64 - 1, logit_bias={3: -1.5})


def test_every_option_reaches_the_wire():
    """Stops, flags and a conversation are carried as given."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    request = Request(messages=turns, stop=["x", "y"], stop_token_ids=[7], ignore_end=True, include_rounds=True)
    assert request.to_message() == generate_pb2.GenerateRequest(
        chat=generate_pb2.Chat(messages=[generate_pb2.ChatMessage(**turn) for turn in turns]),
        stop=["x", "y"],
        stop_token_ids=[7],
        ignore_end=True,
        include_rounds=True,
    )


def test_a_structure_is_a_text_or_a_schema_as_an_object():
    """One of three, and only one."""
    assert Request("Hi", json_schema={"type": "object"}).to_message().json_schema == '{"type": "object"}'
    assert Request("Hi", json_schema="{}").to_message().json_schema == "{}"
    assert Request("Hi", regex="a+").to_message().WhichOneof("structure") == "regex"
    assert Request("Hi", grammar="root ::= a").to_message().WhichOneof("structure") == "grammar"
    assert Request("Hi").to_message().WhichOneof("structure") is None
    with pytest.raises(InvalidRequest, match="given: regex, grammar"):
        Request("Hi", regex="a", grammar="root ::= a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "given: none"),
        ({"prompt": "a", "text": "b"}, "given: prompt, text"),
        ({"text": "a", "system": "b"}, "system goes with prompt"),
        ({"prompt": "a", "stop": "END"}, r"\['END'\]"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options, message):
    """One input, a system message only before a prompt, stops as a sequence."""
    with pytest.raises(errors.InvalidRequest, match=message):
        Request(**options)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", sampling=Sampling(seed=2**64)), f"seed is {2**64}"),
        (Request("a", max_tokens=2**31), str(2**31)),
        (Request(token_ids=[2**31]), "cannot be sent"),
        (Request(messages=[{"role": "user", "words": "a"}]), "words"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused(request_, message):
    """The error names the value, before anything is sent."""
    with pytest.raises(errors.InvalidRequest, match=message):
        request_.to_message()


def test_an_unknown_option_is_a_type_error():
    """A misspelt parameter is never ignored."""
    with pytest.raises(TypeError, match="max_token"):
        Request("Hi", max_token=3)
