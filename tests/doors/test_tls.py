"""TLS at every door and between the services: who is trusted, who is not, and certificates that change."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import gateway.assembly
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from tests.doors.certificates import Authority, Pair
from tests.system.local_stack import LocalStack, local_stack
from treewire import AsyncClient
from treewire.errors import Unavailable
from treewire.health import main as health_main
from treewire.runtime.tls import server_credentials

LOCALHOST = "localhost:0"


def serving(pair: Pair, client_ca: Path | None = None) -> dict[str, Any]:
    """Settings of a server with this certificate, which asks callers for one if there is an authority."""
    return {"tls_certificate_file": pair.certificate, "tls_key_file": pair.key, "tls_client_ca_file": client_ca}


@asynccontextmanager
async def mutual(authority: Authority, **gateway: Any) -> AsyncIterator[LocalStack]:
    """A stack whose services trust only certificates of the authority; the gateway shows its own."""
    inner, outer = authority.issue("service"), authority.issue("gateway")
    service = {"bind": LOCALHOST, **serving(inner, authority.ca)}
    options = {
        "upstream_ca_file": authority.ca,
        "upstream_certificate_file": outer.certificate,
        "upstream_key_file": outer.key,
        **serving(outer),
        **gateway,
    }
    async with local_stack(verify=service, draft=service, http_bind=LOCALHOST, gateway_bind=LOCALHOST, **options) as stack:
        yield stack


def http_client(stack: LocalStack, ca: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.http_url, verify=ssl.create_default_context(cafile=str(ca)), trust_env=False)


async def test_everything_is_encrypted_and_known(tmp_path: Path) -> None:
    """mTLS between the services, TLS towards clients at both doors: a generation comes through."""
    authority = Authority(tmp_path)
    async with mutual(authority) as stack:
        assert stack.http_url.startswith("https://localhost:")
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        async with AsyncClient(stack.address, credentials=credentials) as client, http_client(stack, authority.ca) as http:
            generation = await client.generate("Hi", max_tokens=5, ignore_end=True)
            assert len(generation.token_ids) == 5
            assert generation.statistics.draft_tokens > 0
            body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 5


async def test_a_door_whose_key_is_another_one_s_does_not_open(tmp_path: Path) -> None:
    """Either door says so when it is opened."""
    authority = Authority(tmp_path)
    settings = GatewaySettings(bind=LOCALHOST, http_bind=LOCALHOST, verify="127.0.0.1:1", draft="", model="m")
    pair = Pair(authority.issue("one").certificate, authority.issue("other").key)
    mixed = settings.model_copy(update=serving(pair))
    async with gateway.assembly.assemble(mixed, Tokenization.simulated) as process:
        with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
            async with process.http_door():
                pytest.fail("it opened")
    assert mixed.certificates is not None
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        server_credentials(mixed.certificates)


async def test_health_command_shows_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service that asks for one tells its health to whoever has it, and to nobody else."""
    authority = Authority(tmp_path)
    async with mutual(authority) as stack:
        mine = authority.issue("probe")
        asking = ["--address", stack.verify_running.address, "--tls-ca-file", str(authority.ca)]
        showing = ["--tls-certificate-file", str(mine.certificate), "--tls-key-file", str(mine.key)]
        assert await asyncio.to_thread(health_main, [*asking, *showing]) == 0
        assert await asyncio.to_thread(health_main, asking) == 1
    assert "SERVING\n" in capsys.readouterr().out


async def test_strangers_are_turned_away(tmp_path: Path) -> None:
    """No service answers without a certificate of the authority, and no client trusts one of another authority."""
    (tmp_path / "strange").mkdir()
    authority, strange = Authority(tmp_path), Authority(tmp_path / "strange", "stranger")
    async with mutual(authority) as stack:
        impostor = strange.issue("impostor")
        for credentials in (
            grpc.ssl_channel_credentials(authority.ca.read_bytes()),
            grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), impostor.key.read_bytes(), impostor.certificate.read_bytes()
            ),
        ):
            async with grpc.aio.secure_channel(stack.verify_running.address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/treewire.v1.VerifyService/GetTarget")(b"", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        distrusting = grpc.ssl_channel_credentials(strange.ca.read_bytes())
        async with AsyncClient(stack.address, credentials=distrusting) as client:
            with pytest.raises(Unavailable):
                await client.generate("Hi", max_tokens=2)
        async with http_client(stack, strange.ca) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get("/health")


async def test_client_certificates_can_be_required_of_http_too(tmp_path: Path) -> None:
    """Without one the handshake fails, with one of the authority it does not."""
    authority = Authority(tmp_path)
    pair = authority.issue("gateway-2")
    async with mutual(authority, **serving(pair, authority.ca)) as stack:
        async with http_client(stack, authority.ca) as http:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                await http.get("/health")
        context = ssl.create_default_context(cafile=str(authority.ca))
        mine = authority.issue("client")
        context.load_cert_chain(mine.certificate, mine.key)
        async with httpx.AsyncClient(base_url=stack.http_url, verify=context, trust_env=False) as http:
            assert (await http.get("/health")).status_code == 200


async def test_certificates_are_read_again_when_they_change(tmp_path: Path) -> None:
    """New connections see the new certificate at both doors; a pair that does not fit together changes nothing."""
    (tmp_path / "next").mkdir()
    authority, following = Authority(tmp_path), Authority(tmp_path / "next", "following")
    pair = authority.issue("gateway-3")
    async with mutual(authority, **serving(pair)) as stack:

        async def is_trusted(ca: Path) -> list[bool]:
            """Whether a new connection to the HTTP door, and one to the other, trusts the gateway."""
            trusted = []
            async with http_client(stack, ca) as http:
                try:
                    trusted.append((await http.get("/health")).status_code == 200)
                except httpx.ConnectError:
                    trusted.append(False)
            async with AsyncClient(stack.address, credentials=grpc.ssl_channel_credentials(ca.read_bytes())) as client:
                try:
                    trusted.append(bool((await client.model()).model))
                except Unavailable:
                    trusted.append(False)
            return trusted

        assert await is_trusted(authority.ca) == [True, True]
        new = following.issue("renewed")
        shutil.copy(new.certificate, pair.certificate)
        assert await is_trusted(authority.ca) == [True, True], "a certificate without its key is not used"
        shutil.copy(new.key, pair.key)
        assert await is_trusted(following.ca) == [True, True]
        assert await is_trusted(authority.ca) == [False, False]
