"""A listener with a certificate of its own: shown to its clients alone, and read again when it changes."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from smq.clients import Admin
from smq.clients.tls import Tls
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ListenerConfig, ServerConfig
from smq.coordinator.server.composition import Server
from smq.coordinator.tls.certificate_files import Identity
from smq.coordinator.user_errors import StartError
from smq.testing.served import Served, node_config, served_node
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of, dialling

__all__ = ("authorities",)  # a fixture
ANY = ("127.0.0.1", 0)


def with_outside(a: Authorities, other: Identity, **changes: Any) -> dict[str, Any]:
    """A node whose listener for the outside shows a certificate of another authority, which names no node of ours."""
    outside = ListenerConfig(
        name="outside",
        grpc_address=ANY,
        kafka_address=ANY,
        client_certificates=False,
        ca=other.ca,
        certificate=other.certificate,
        key=other.key,
        **changes,
    )
    return {"tls": config_of(a.node(1)), "kafka_address": ANY, "listeners": {"outside": outside}}


def shown(address: tuple[str, int]) -> bytes:
    """The certificate that a port shows."""
    with socket.create_connection(address) as sock, dialling(None).wrap_socket(sock) as secure:
        return secure.getpeercert(binary_form=True) or b""


def kafka_address(served: Served, listener: str) -> tuple[str, int]:
    server = served.server._kafka
    assert server is not None
    host, port = server.acceptors[listener]._listener.getsockname()[:2]
    return str(host), int(port)


async def test_each_port_shows_the_certificate_of_its_listener(authorities: Authorities, tmp_path: Path) -> None:
    other = authorities.stranger(9)
    other_ca = authorities.other / "ca" / "ca.crt"

    async with served_node(tmp_path, **with_outside(authorities, other)) as served:
        grpc = served.server._grpc.bound
        async with Admin(format_address(grpc["outside"]), tls=Tls(ca=other_ca)) as admin:  # no client's certificate
            assert await admin.list_topics() == []
        kafka = {name: await asyncio.to_thread(shown, kafka_address(served, name)) for name in ("", "outside")}
        own = await asyncio.to_thread(shown, grpc[""])
        assert kafka[""] == own
        assert kafka["outside"] == await asyncio.to_thread(shown, grpc["outside"])
        assert kafka["outside"] != own


async def test_a_renewed_certificate_of_a_listener_is_shown_after_a_reload(
    authorities: Authorities, tmp_path: Path
) -> None:
    other = authorities.stranger(9)

    async with served_node(tmp_path, **with_outside(authorities, other)) as served:
        before = await asyncio.to_thread(shown, kafka_address(served, "outside"))
        own = await asyncio.to_thread(shown, kafka_address(served, ""))
        authorities.stranger(9)  # writes the same files again
        served.server.reload()
        after = await asyncio.to_thread(shown, kafka_address(served, "outside"))
        assert before != after
        assert own == await asyncio.to_thread(shown, kafka_address(served, ""))


async def test_an_unusable_certificate_of_a_listener_is_refused_by_its_name(
    authorities: Authorities, tmp_path: Path
) -> None:
    absent = Identity(directory=tmp_path / "absent")
    config: ServerConfig = node_config(tmp_path, **with_outside(authorities, absent))

    with pytest.raises(StartError, match=r"\[listeners\.outside\]: cannot read .*absent"):
        await Server(config).start()


async def test_the_end_of_a_listeners_certificate_is_in_the_metrics(authorities: Authorities, tmp_path: Path) -> None:
    other = authorities.stranger(9)

    async with served_node(tmp_path, **with_outside(authorities, other)) as served:
        from smq.coordinator.http.collectors import ConnectionCollector

        families = {f.name: f for f in ConnectionCollector({}, {}, served.server._tls).collect()}
        ends = {s.labels["of"]: s.value for s in families["smq_tls_certificate_end_timestamp_seconds"].samples}
        assert ends["listener outside"] > time.time()
        assert set(ends) == {"node", "ca", "listener outside"}
