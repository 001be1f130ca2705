"""The OpenAPI document, and requests made from it: whatever fits or nearly fits it, the door answers as the document says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from gateway.openai.document import OPERATIONS, document
from tests.system.local_stack import local_stack

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
NUM_EXAMPLES = 60
TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The door of a stack that runs on a loop of its own, since schemathesis is synchronous."""
    ready, done = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        limits = {"max_output_tokens": 8, "max_tokens": 4, "max_message_bytes": 1 << 16}
        async with local_stack(http_bind="127.0.0.1:0", **limits) as stack:
            urls.append(stack.http_url)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield urls[0]
    done.set()
    thread.join()


schema = schemathesis.openapi.from_dict(document())


@pytest.mark.timeout(340)
@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_requests_made_of_the_document(case: schemathesis.Case, url: str) -> None:
    """No 5xx, no status, type or body that the document does not have, and nothing taken that it forbids."""
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=TIMEOUT_SECONDS)


def test_document_has_every_route_and_its_errors() -> None:
    """Each operation tells of its answer and of what may go wrong; references lead somewhere."""
    told = document()
    assert set(told["paths"]) == {each.path for each in OPERATIONS}
    for path in ("/v1/chat/completions", "/v1/completions"):
        statuses = set(told["paths"][path]["post"]["responses"])
        assert {"200", "400", "401", "404", "413", "415", "429", "503"} <= statuses

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, each in value.items():
                if key == "$ref":
                    yield each
                else:
                    yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    names = told["components"]["schemas"]
    assert {reference.rsplit("/", 1)[1] for reference in references(told)} <= names.keys()
