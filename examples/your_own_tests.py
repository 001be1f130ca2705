"""A gateway for the tests of your program: it answers from a script, over real gRPC, in this process."""

from treewire import Client
from treewire.errors import Overloaded
from treewire.testing import FakeGateway

with FakeGateway("An oak.", Overloaded("full", retry_after_seconds=2.0)) as gateway, Client(gateway.address) as client:
    assert client.generate("Name a tree.").text == "An oak."
    try:
        client.generate("Name another.")
    except Overloaded as error:
        print(f"full, come back in {error.retry_after_seconds:g} s")
    assert [request.chat.messages[0].content for request in gateway.requests] == ["Name a tree.", "Name another."]
print("all as expected")
