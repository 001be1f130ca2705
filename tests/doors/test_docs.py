"""The examples of the documentation run, and its reference is that of the settings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.system.local_stack import local_stack
from treewire.runtime.keys import Keys
from treewire.runtime.reference import SERVICES, reference

ROOT = Path(__file__).parents[2]
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
EXAMPLES = [ROOT / "examples" / name for name in re.findall(r"\.\./examples/(\w+\.py)", CLIENTS)]
HTTP_OF_DOCS = "http://127.0.0.1:8000"
MODEL_OF_DOCS = '"model": "smollm2-135m"'
FLAG_OF_HEALTH = "--tls-ca-file"
RUN_SECONDS = 60


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in that language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


async def run(command: list[str], url: str = "", address: str = "") -> subprocess.CompletedProcess[str]:
    """The finished command, in an environment that knows the doors."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TREEWIRE_ADDRESS": address,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "NO_PROXY": "127.0.0.1",
    }
    return await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
async def test_examples_run(example: Path) -> None:
    """Each example of the clients page ends well against a running stack and has something to say."""
    async with local_stack(http_bind="127.0.0.1:0") as stack:
        done = await run([sys.executable, str(example)], stack.http_url, stack.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


async def test_python_of_the_clients_page_runs() -> None:
    """Each block as it stands."""
    codes = blocks(CLIENTS, "python")
    assert len(codes) >= 2
    async with local_stack(http_bind="127.0.0.1:0") as stack:
        for code in codes:
            done = await run([sys.executable, "-c", code], stack.http_url, stack.address)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


async def test_curl_of_the_clients_page_runs() -> None:
    """Each command, with the address and the model of the test's stack, is answered without an error."""
    commands = re.findall(r"^curl .*?(?=^curl |\Z)", "".join(blocks(CLIENTS, "sh")), re.DOTALL | re.MULTILINE)
    assert len(commands) >= 10
    async with local_stack(http_bind="127.0.0.1:0") as stack:
        for command in commands:
            here = command.replace(HTTP_OF_DOCS, stack.http_url).replace(MODEL_OF_DOCS, '"model": "under-test"')
            assert HTTP_OF_DOCS not in here
            done = await run(["bash", "-c", f"{here.rstrip()} --fail-with-body --noproxy '*'"])
            assert done.returncode == 0, f"{here}\n{done.stdout}{done.stderr}"
            if '"stream": true' in command:
                events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
                assert events[-1] == "[DONE]"
                assert "metrics" in json.loads(events[-2])
            elif "/metrics" not in command:
                assert json.loads(done.stdout)


def test_metrics_of_the_clients_page_add_up() -> None:
    """The block that is shown could have been sent."""
    block = json.loads(blocks(CLIENTS, "json")[0])["metrics"]["speculative_decoding"]
    counts = block["acceptance_histogram"]
    assert len(counts) == block["num_spec_tokens"] + 1
    assert sum(counts) == block["num_spec_steps"]
    assert sum(count * steps for count, steps in enumerate(counts)) == block["num_accepted_draft_tokens"]


def test_keys_of_the_security_page_can_be_used(tmp_path: Path) -> None:
    """Both callers, by key and by digest."""
    file = tmp_path / "keys.toml"
    file.write_text(blocks(SECURITY, "toml")[0])
    keys = Keys(file=file)
    assert keys.caller("Bearer sk-alice-f3a9...").limits.requests_per_minute == 60
    assert keys.caller("Bearer test").name == "bob"


def test_reference_is_that_of_the_settings() -> None:
    """docs/configuration.md is what `python -m treewire.runtime.reference` prints."""
    expected = reference([resolve_name(name) for name in SERVICES])
    assert (ROOT / "docs" / "configuration.md").read_text() == expected, "make docs-reference"


def test_settings_named_on_the_security_page_exist() -> None:
    """Every flag is one of some service."""
    known = {f"--{name.replace('_', '-')}" for service in SERVICES for name in resolve_name(service).model_fields}
    assert set(re.findall(r"--[a-z][a-z-]+", SECURITY)) - {FLAG_OF_HEALTH} <= known
