"""Which callers get an answer on the HTTP port: probes without a certificate, /metrics by certificate or token."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import HttpConfig, TlsConfig
from smq.coordinator.http.access import HttpAccess, read_token
from smq.coordinator.server.composition import Server
from smq.coordinator.user_errors import StartError
from smq.testing.served import node_config, served_node
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of, dialling

__all__ = ("authorities",)  # a fixture
TOKEN = "t" * 32
Ask = Callable[..., Awaitable[tuple[int, str]]]


@asynccontextmanager
async def asking(directory: Path, rule: HttpConfig, tls: Any = None) -> AsyncIterator[Ask]:
    async with served_node(directory, tls=tls, http=rule) as served:
        scheme = "http" if tls is None else "https"
        address = format_address(served.server.http_address)

        async def ask(
            path: str, context: ssl.SSLContext | None = None, token: str | None = None, host: str = address
        ) -> tuple[int, str]:
            headers = {"Host": host} | ({} if token is None else {"Authorization": f"Bearer {token}"})
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"{scheme}://{address}{path}", ssl=context or False) as response,
            ):
                return response.status, await response.text()

        yield ask


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


async def test_probes_for_anyone_tell_strangers_nothing_and_clients_everything(
    authorities: Authorities, tmp_path: Path
) -> None:
    async with asking(tmp_path, HttpConfig(probes="anyone"), config_of(authorities.node(1))) as ask:
        stranger, client = dialling(None), dialling(authorities.client())
        assert await ask("/healthz", stranger) == (200, '{"status": "ok"}')
        assert await ask("/readyz", stranger) == (200, '{"ready": true}')
        assert '"raft_term"' in (await ask("/readyz", client))[1]
        assert '"node": 1' in (await ask("/healthz", client))[1]
        status, text = await ask("/metrics", stranger)
        assert (status, "show a client's certificate" in text) == (403, True)
        assert (await ask("/metrics", client))[0] == 200


async def test_a_certificate_of_a_strange_authority_is_refused_even_if_none_is_needed(
    authorities: Authorities, tmp_path: Path
) -> None:
    async with asking(tmp_path, HttpConfig(probes="anyone"), config_of(authorities.node(1))) as ask:
        with pytest.raises(aiohttp.ClientError):
            await ask("/healthz", dialling(authorities.stranger()))


async def test_metrics_open_to_the_token_and_to_clients(
    authorities: Authorities, tmp_path: Path, token_file: Path
) -> None:
    rule = HttpConfig(metrics="token", token_file=token_file)
    renew, remove = token_file.write_text, token_file.unlink
    async with asking(tmp_path, rule, config_of(authorities.node(1))) as ask:
        stranger, client = dialling(None), dialling(authorities.client())
        assert (await ask("/metrics", stranger, token=TOKEN))[0] == 200
        assert (await ask("/metrics", client))[0] == 200
        for wrong in (None, "", TOKEN[:-1], TOKEN + "t", "ü" * 32):
            status, text = await ask("/metrics", stranger, token=wrong)
            assert (status, "show the token" in text) == (401, True)
        assert (await ask("/readyz", stranger, token=TOKEN))[0] == 403  # the token is for /metrics alone
        renew("n" * 32)
        assert (await ask("/metrics", stranger, token=TOKEN))[0] == 401
        assert (await ask("/metrics", stranger, token="n" * 32))[0] == 200
        remove()
        assert (await ask("/metrics", stranger, token="n" * 32))[0] == 401


async def test_without_tls_the_token_is_asked_for_too(tmp_path: Path, token_file: Path) -> None:
    async with asking(tmp_path, HttpConfig(probes="anyone", metrics="token", token_file=token_file)) as ask:
        assert (await ask("/metrics"))[0] == 401
        assert (await ask("/metrics", token=TOKEN))[0] == 200
        assert '"pid"' in (await ask("/readyz"))[1]  # from this machine


async def test_a_strangers_name_for_this_machine_shows_nothing(tmp_path: Path) -> None:
    async with asking(tmp_path, HttpConfig()) as ask:
        assert (await ask("/metrics", host="evil.example:8080"))[0] == 421
        assert (await ask("/metrics", host="localhost"))[0] == 200
        assert await ask("/readyz", host="evil.example") == (200, '{"ready": true}')
        assert await ask("/healthz", host="evil.example") == (200, '{"status": "ok"}')


async def test_http_may_be_plain_beside_ports_with_tls(authorities: Authorities, tmp_path: Path) -> None:
    async with served_node(
        tmp_path, tls=config_of(authorities.node(1)), http=HttpConfig(tls=False, metrics="anyone")
    ) as served:
        url = f"http://{format_address(served.server.http_address)}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_token_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        read_token(path)


async def _start(tmp_path: Path) -> None:
    rule = HttpConfig(metrics="token", token_file=tmp_path / "absent")
    await Server(node_config(tmp_path, http=rule)).start()


def test_a_node_without_its_token_file_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"http\.token_file .*absent"):
        asyncio.run(_start(tmp_path))


@pytest.mark.parametrize("rule", [HttpConfig(probes="anyone"), HttpConfig(probes="anyone", tls=False)])
async def test_what_lets_probes_in_lets_no_stranger_read_the_console(
    authorities: Authorities, tmp_path: Path, rule: HttpConfig
) -> None:
    async with served_node(tmp_path, tls=config_of(authorities.node(1)), http=rule) as served:
        scheme = "http" if rule.tls is False else "https"
        base = f"{scheme}://{format_address(served.server.http_address)}"
        async with aiohttp.ClientSession() as session:
            for path in ("/console/", "/console/topics", "/console/settings"):
                async with session.get(base + path, ssl=dialling(None)) as response:
                    assert (response.status, "certificate" in await response.text()) == (403, True)
            async with session.get(base + "/healthz", ssl=dialling(None)) as response:
                assert response.status == 200
            if rule.tls is None:
                async with session.get(base + "/console/topics", ssl=dialling(authorities.client())) as response:
                    assert response.status == 200


@pytest.mark.parametrize("is_insecure", [False, True])
@pytest.mark.parametrize("remote", ["127.0.0.1", "::ffff:127.0.0.1", "10.0.0.9"])
@pytest.mark.parametrize("has_tls", [False, True])
def test_without_certificates_the_console_is_for_this_machine(
    tmp_path: Path, has_tls: bool, remote: str, is_insecure: bool
) -> None:
    """Although [http] lets strangers in for probes and metrics, and a listener for users may have TLS alone."""
    files = TlsConfig(ca=tmp_path, certificate=tmp_path, key=tmp_path, client_certificates=False)
    rule = HttpConfig(probes="anyone", metrics="anyone")
    access = HttpAccess(node_config(tmp_path, http=rule, tls=files if has_tls else None, insecure=is_insecure))
    request = make_mocked_request("GET", "/console/topics").clone(remote=remote)
    refusal = pytest.raises(web.HTTPForbidden) if remote == "10.0.0.9" and not is_insecure else nullcontext()
    with refusal:
        asyncio.run(access.refuse_console(request))
