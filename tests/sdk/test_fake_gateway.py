"""What users' tests can rely on."""

from __future__ import annotations

import pytest

from treewire import Client, errors
from treewire.testing import FakeGateway, Reply


def test_replies_come_in_order_and_the_last_one_stays():
    """Texts and replies are answered in turn, then the last again."""
    reply = Reply((("a", (1, 2)), ("b", (3,))), finish_reason="length")
    with FakeGateway("one two", reply) as gateway, Client(gateway.address) as client:
        assert client.generate("x").text == "one two"
        for _ in range(2):
            generation = client.generate("y")
            assert (generation.text, generation.token_ids, generation.finish_reason) == ("ab", (1, 2, 3), "length")


def test_requests_are_kept():
    """A test can see what the program asked."""
    with FakeGateway("ok") as gateway, Client(gateway.address) as client:
        client.generate(text="continue", max_tokens=3)
        assert [(request.text, request.max_tokens) for request in gateway.requests] == [("continue", 3)]


def test_an_error_is_raised_at_the_client():
    """An error in the script is what the client raises, values and all."""
    scripted = errors.InvalidRequest("max_tokens is 0, at least 1 is needed", metadata={"field": "max_tokens"})
    with FakeGateway(scripted) as gateway, Client(gateway.address) as client:
        with pytest.raises(errors.InvalidRequest, match="max_tokens is 0") as caught:
            client.generate("x")
        assert caught.value.metadata == {"field": "max_tokens"}
        assert client.model().model == "fake"


def test_a_script_needs_a_reply():
    """Nothing to say is refused at once."""
    with pytest.raises(ValueError, match="0 replies"):
        FakeGateway()
