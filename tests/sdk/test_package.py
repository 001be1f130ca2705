"""What `import treewire` costs and shows."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import treewire
from treewire.client import MAX_MESSAGE_BYTES

ROOT = Path(__file__).parents[2]
BLOCKED = "numpy torch transformers tokenizers pydantic structlog rich typer grpc_health prometheus_client"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code with every optional package blocked."""
    block = f"import sys\nfor name in '{BLOCKED}'.split(): sys.modules[name] = None\n"
    command = [sys.executable, "-c", block + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_sdk_works_on_a_base_install():
    """Client, types, events, errors and the fake gateway need grpcio, protobuf and the standard library alone."""
    code = """
import treewire
from treewire.testing import FakeGateway
with FakeGateway("Hello there.") as gateway, treewire.Client(gateway.address) as client:
    print(client.generate("Hi").text, treewire.Sampling, treewire.AsyncClient, treewire.events, treewire.errors)
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Hello there.")


def test_the_core_needs_no_grpc():
    """Importing a part of the package does not import the client."""
    result = python("sys.modules['grpc'] = None\nimport treewire.core.sampling")
    assert result.returncode == 0, result.stderr


def test_the_command_line_says_what_it_lacks():
    """Without typer the program ends with status 2 and the command that installs it."""
    result = python("import runpy; runpy.run_module('treewire', run_name='__main__')")
    assert result.returncode == 2
    assert 'pip install "treewire[cli]"' in result.stderr


def test_what_is_exported():
    """Two clients, Sampling, events, errors; nothing else, and all of it there."""
    assert set(treewire.__all__) == {"Client", "AsyncClient", "Sampling", "events", "errors", "__version__"}
    assert all(hasattr(treewire, name) for name in treewire.__all__)
    assert not hasattr(treewire, "Generation")


def test_the_version_is_that_of_the_distribution():
    """One version, in two places that cannot drift."""
    assert treewire.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_client_takes_messages_as_large_as_the_services_send():
    """The SDK cannot import the services' limit, so the two are held equal here."""
    from treewire.wire import MAX_MESSAGE_BYTES as SERVICE_LIMIT

    assert MAX_MESSAGE_BYTES == SERVICE_LIMIT
