"""TLS on the client ports, gRPC, Kafka and HTTP: which clients are admitted, and renewal while the node runs."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from cryptography import x509

from smq.clients import Admin, Consumer, ErrorCode, Producer, SmqError, Tls
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import AdminStub
from smq.coordinator.config.addresses import format_address
from smq.coordinator.server.composition import Server
from smq.coordinator.tls.certificate_files import Identity
from smq.coordinator.tls.loading import client_context
from smq.testing.served import PATIENCE_S, Served, served_node
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of, dialling

__all__ = ("authorities",)  # a fixture
SOON_MS = 1_000.0  # enough for a client that is never admitted
API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)  # size, key, version, correlation id, no client id


def client_tls(identity: Identity | None, ca: Path) -> Tls:
    if identity is None:
        return Tls(ca=ca)
    return Tls(ca=ca, certificate=identity.certificate, key=identity.key)


class Secured:
    """A node under TLS, and clients of all kinds."""

    def __init__(self, served: Served, a: Authorities) -> None:
        self.server: Server = served.server
        self.a = a
        self.grpc = format_address(self.server.grpc_address)

    async def over_grpc(self, tls: Tls, *, within_ms: float = 10_000.0) -> bool:
        """Whether a client is served."""
        try:
            async with Admin(self.grpc, tls=tls, connect_timeout_ms=within_ms) as admin:
                await admin.list_topics()
        except SmqError as e:
            if e.code is not ErrorCode.UNREACHABLE:
                raise
            return False
        return True

    async def over_http(self, context: ssl.SSLContext | None) -> bool:
        scheme = "http" if context is None else "https"
        url = f"{scheme}://{format_address(self.server.http_address)}/healthz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url, ssl=context or False) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def over_kafka(self, context: ssl.SSLContext | None) -> bool:
        assert self.server.kafka_address is not None
        try:
            reader, writer = await asyncio.open_connection(*self.server.kafka_address, ssl=context)
            writer.write(API_VERSIONS)
            answered = bool(await reader.read(1))
            writer.close()
        except (ConnectionError, ssl.SSLError):
            return False
        return answered


@asynccontextmanager
async def secured(directory: Path, a: Authorities, *, client_certificates: bool = True) -> AsyncIterator[Secured]:
    tls = config_of(a.node(1), client_certificates=client_certificates)
    async with (
        served_node(directory, tls=tls, kafka_address=("127.0.0.1", 0)) as served,
        asyncio.timeout(PATIENCE_S),
    ):
        yield Secured(served, a)


def ca_of(a: Authorities) -> Path:
    return a.ours / "ca" / "ca.crt"


async def test_a_client_with_its_certificate_is_served_on_every_port(authorities: Authorities, tmp_path: Path) -> None:
    identity = authorities.client()
    tls = client_tls(identity, identity.ca)

    async with secured(tmp_path, authorities) as s:
        async with Admin(s.grpc, tls=tls) as admin:
            await admin.create_topic("t")
        async with Producer(s.grpc, tls=tls) as producer:
            sent = await producer.send_many("t", [b"one", b"two"])
            await sent
        async with Consumer(s.grpc, tls=tls) as consumer:
            await consumer.assign([("t", 0)])
            found = await consumer.getmany(2, 10_000)
        assert [r.value for r in found["t", 0]] == [b"one", b"two"]
        context = client_context(config_of(identity))
        assert await s.over_http(context)
        assert await s.over_kafka(context)


async def test_no_client_is_admitted_without_a_certificate_of_ours(authorities: Authorities, tmp_path: Path) -> None:
    a = authorities
    intruders = {"none": None, "another authority": a.stranger(1), "ended": a.client("old", days=-1)}

    async with secured(tmp_path, a) as s:
        for name, identity in intruders.items():
            assert not await s.over_grpc(client_tls(identity, ca_of(a)), within_ms=SOON_MS), name
            assert not await s.over_http(dialling(identity)), name
            assert not await s.over_kafka(dialling(identity)), name
        assert await s.over_grpc(client_tls(a.client(), ca_of(a)))  # so it was not the node that did not answer


async def test_plain_text_to_a_tls_port_gets_nothing(authorities: Authorities, tmp_path: Path) -> None:
    async with secured(tmp_path, authorities) as s:
        with pytest.raises(SmqError, match="no node answers"):
            async with Admin(s.grpc, connect_timeout_ms=SOON_MS):
                pass
        assert not await s.over_http(None)
        assert not await s.over_kafka(None)


async def test_tls_to_a_plain_port_is_an_error_and_no_harm(authorities: Authorities, tmp_path: Path) -> None:
    identity = authorities.client()

    async with served_node(tmp_path, kafka_address=("127.0.0.1", 0)) as served:
        s = Secured(served, authorities)
        async with asyncio.timeout(PATIENCE_S):
            assert not await s.over_grpc(client_tls(identity, identity.ca), within_ms=SOON_MS)
            assert not await s.over_http(dialling(identity))
            assert not await s.over_kafka(dialling(identity))
        await served.create("still-there")


async def test_without_client_certificates_the_node_is_checked_and_the_client_is_not(
    authorities: Authorities, tmp_path: Path
) -> None:
    a = authorities

    async with secured(tmp_path, a, client_certificates=False) as s:
        assert await s.over_grpc(Tls(ca=ca_of(a)))
        assert await s.over_http(dialling(None))
        assert await s.over_kafka(dialling(None))
        assert not await s.over_grpc(Tls(ca=a.other / "ca" / "ca.crt"), within_ms=SOON_MS), (
            "the client trusts another authority"
        )


async def test_a_client_does_not_speak_to_a_node_under_a_name_that_is_not_its_own(
    authorities: Authorities, tmp_path: Path
) -> None:
    """The certificate is for 127.0.0.1; any server could be behind 127.0.0.2."""
    identity = authorities.client()
    tls = client_tls(identity, identity.ca)

    async with secured(tmp_path, authorities) as s:
        async with await _relay("127.0.0.2", s.server.grpc_address) as relay:
            host, port = relay.sockets[0].getsockname()[:2]
            s.grpc = f"{host}:{port}"
            assert not await s.over_grpc(tls, within_ms=SOON_MS)
        async with await _relay("127.0.0.1", s.server.grpc_address) as relay:
            s.grpc = format_address(relay.sockets[0].getsockname()[:2])
            assert await s.over_grpc(tls)


async def _relay(host: str, target: tuple[str, int]) -> asyncio.Server:
    """A proxy between client and node that passes every byte on."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except ConnectionError:
            pass  # one side is gone: so is the other
        writer.close()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*target)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    return await asyncio.start_server(on_connect, host, 0)


async def test_renewed_files_are_shown_to_new_connections_on_every_port(
    authorities: Authorities, tmp_path: Path
) -> None:
    identity = authorities.client()
    tls = client_tls(identity, identity.ca)

    async with secured(tmp_path, authorities) as s:
        assert s.server.kafka_address is not None
        ports = (s.server.grpc_address, s.server.kafka_address, s.server.http_address)
        async with Admin(s.grpc, tls=tls) as admin:
            before = [await asyncio.to_thread(_shown, port) for port in ports]
            assert len(set(before)) == 1
            authorities.node(1)
            s.server.reload()
            after = [await asyncio.to_thread(_shown, port) for port in ports]
            assert len(set(after)) == 1
            assert after[0] != before[0]
            await admin.list_topics()  # over the old connection
        assert await s.over_grpc(tls)


def _shown(port: tuple[str, int]) -> bytes:
    """The certificate that a listener shows."""
    with socket.create_connection(port) as sock, dialling(None).wrap_socket(sock) as secure:
        return secure.getpeercert(binary_form=True) or b""


async def test_ends_of_certificates_are_shown_in_metrics_and_status(authorities: Authorities, tmp_path: Path) -> None:
    identity = authorities.client()

    async with secured(tmp_path, authorities) as s:
        async with Admin(s.grpc, tls=client_tls(identity, identity.ca)) as admin:
            status = await admin.node_status(1)
        url = f"https://{format_address(s.server.http_address)}/metrics"
        context = client_context(config_of(identity))
        async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
            lines = (await response.text()).splitlines()
        (line,) = [x for x in lines if x.startswith('smq_tls_certificate_end_timestamp_seconds{of="node"}')]
        shown = await asyncio.to_thread(_shown, s.server.http_address)
        end_s = x509.load_der_x509_certificate(shown).not_valid_after_utc.timestamp()
        assert (float(line.split()[-1]), status.certificate_ends_ms) == (end_s, int(end_s * 1000))
        assert "smq_tls_reload_failing 0.0" in lines


def test_half_of_a_clients_identity_is_refused() -> None:
    with pytest.raises(SmqError, match="its key together"):
        Tls(ca="ca.crt", certificate="tls.crt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SmqError, match=r"cannot read .*absent"):
        Admin("127.0.0.1:1", tls=Tls(ca=tmp_path / "absent"))


async def test_clients_without_settings_take_their_files_from_the_environment(
    authorities: Authorities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = authorities.client()

    async with secured(tmp_path, authorities) as s:
        monkeypatch.setenv("SMQ_TLS_CA", str(identity.ca))
        monkeypatch.setenv("SMQ_TLS_CERTIFICATE", str(identity.certificate))
        monkeypatch.setenv("SMQ_TLS_KEY", str(identity.key))
        async with Admin(s.grpc) as admin:
            assert await admin.list_topics() == []


async def test_grpc_answers_a_wrong_certificate_with_unavailable(authorities: Authorities, tmp_path: Path) -> None:
    """What clients of other languages see."""
    ca = ca_of(authorities).read_bytes()

    async with secured(tmp_path, authorities) as s:
        async with grpc.aio.secure_channel(s.grpc, grpc.ssl_channel_credentials(ca)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await AdminStub(channel).DescribeCluster(pb.DescribeClusterRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
