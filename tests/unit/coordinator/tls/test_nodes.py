"""TLS between nodes: a peer needs its node's certificate, and every other attempt is refused."""

import asyncio
import contextlib
import os
import pickle
import shlex
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from smq.coordinator.cli.root import cli
from smq.coordinator.config.node_toml import parse_config
from smq.coordinator.tls.certificate_files import Identity, client_identity, node_identity
from smq.coordinator.tls.contexts import NodeTls
from smq.coordinator.tls.loading import TlsError
from smq.raft_state.ids import NodeId
from smq.replication.net.listening import bind_listener
from smq.replication.net.peer_tls import node_uri
from smq.replication.net.tcp import TcpNetwork, TcpSettings
from tests.unit.coordinator.tls.authorities import CLUSTER_ID, Authorities, authorities, config_of, dialling, node_tls
from tests.unit.replication.net.test_tcp import CONTROL, DATA, ONE, PATIENCE_S, TWO, Recorder, frame, hello_frame

__all__ = ("authorities",)  # a fixture
QUICK = TcpSettings(redial_min_ms=1, redial_max_ms=10)


class SecurePair:
    """Nodes 1 and 2 on free ports. Each may be started with whatever certificate a test likes."""

    def __init__(self) -> None:
        self._listeners = {n: bind_listener("127.0.0.1", 0) for n in (ONE, TWO)}
        self.peers = {n: ("127.0.0.1", s.getsockname()[1]) for n, s in self._listeners.items()}
        self.handlers: dict[NodeId, Recorder] = {}
        self.networks: dict[NodeId, TcpNetwork] = {}

    def start(self, node: NodeId, tls: NodeTls | None, settings: TcpSettings = QUICK) -> Recorder:
        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=node,
            cluster_id=CLUSTER_ID,
            peers=self.peers,
            listener=self._listeners.pop(node),
            settings=settings,
            tls=tls,
        )
        self.networks[node], self.handlers[node] = network, Recorder()
        network.start(self.handlers[node])
        return self.handlers[node]

    async def both_open(self) -> None:
        for handler in self.handlers.values():
            await handler.wait_count("open", 1, CONTROL)
            await handler.wait_count("open", 1, DATA)

    async def read_answer(self, context: ssl.SSLContext | None, payload: bytes) -> bytes:
        """What node 2 answers to a stranger that connects and sends `payload`; nothing if it closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                reader, writer = await asyncio.open_connection(*self.peers[TWO], ssl=context)
                writer.write(payload)
                answer = await reader.read(1)
                writer.close()
            except (ConnectionError, ssl.SSLError):
                return b""
        return answer

    def close(self) -> None:
        for network in self.networks.values():
            network.close()
        for listener in self._listeners.values():
            listener.close()


@asynccontextmanager
async def with_pair() -> AsyncIterator[SecurePair]:
    pair = SecurePair()
    try:
        yield pair
    finally:
        pair.close()


async def test_nodes_with_their_own_certificates_exchange_messages_of_all_sizes(authorities: Authorities) -> None:
    async with with_pair() as pair:
        for node in (ONE, TWO):
            pair.start(node, node_tls(authorities.node(node), node))
        await pair.both_open()
        big = os.urandom(5 << 20)
        for payload in (b"small", b"", big, b"after"):
            assert pair.networks[ONE].send(TWO, DATA, [memoryview(payload)])
            assert pair.networks[TWO].send(ONE, DATA, [payload[:3], memoryview(payload)[3:]])
        for node in (ONE, TWO):
            await pair.handlers[node].wait_count("message", 4, DATA)
            assert pair.handlers[node].messages(DATA) == [b"small", b"", big, b"after"]


# -------------------------------------------------------------------------------------------------- getting in
def _intruders(a: Authorities) -> dict[str, Callable[[], ssl.SSLContext | None]]:
    return {
        "no certificate": lambda: dialling(None),
        "another authority": lambda: dialling(a.stranger(1)),
        "the certificate of node 3": lambda: dialling(a.node(3)),
        "the certificate of node 1 of another cluster": lambda: dialling(a.node(1, cluster_id="d")),
        "a client's certificate": lambda: dialling(a.client()),
        "a client of a node's name": lambda: dialling(a.client("node-1")),
        "a certificate that has ended": lambda: dialling(a.node(1, days=-1)),
        "plain text": lambda: None,
    }


@pytest.mark.parametrize(
    "intruder",
    [
        "no certificate",
        "another authority",
        "the certificate of node 3",
        "the certificate of node 1 of another cluster",
        "a client's certificate",
        "a client of a node's name",
        "a certificate that has ended",
        "plain text",
    ],
)
async def test_no_peer_speaks_as_node_1_without_its_certificate(authorities: Authorities, intruder: str) -> None:
    """A hello of node 1, right to the last byte, and what pysyncobj would have unpickled."""
    hello = hello_frame()
    pickled = pickle.dumps(("os.system", "true"))
    payload = hello + frame(pickled)

    async with with_pair() as pair:
        handler = pair.start(TWO, node_tls(authorities.node(2), 2))
        assert await pair.read_answer(_intruders(authorities)[intruder](), payload) == b""
        assert handler.events == []
        # The very same bytes with node 1's certificate open a session, so it was the certificate that was refused.
        assert await pair.read_answer(dialling(authorities.node(1)), hello) != b""
        assert handler.events[0] == ("open", ONE, CONTROL)


async def test_a_pickle_from_a_peer_is_bytes_to_the_network_and_nothing_runs(
    authorities: Authorities, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    pickled = pickle.dumps(Bomb())

    async with with_pair() as pair:
        handler = pair.start(TWO, node_tls(authorities.node(2), 2))
        payload = hello_frame() + frame(pickled)
        assert await pair.read_answer(dialling(authorities.node(1)), payload) != b""
        await handler.wait_count("message", 1)
        assert handler.messages() == [pickled]
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("node 3", "the certificate names smq://c/nodes/3"),
        ("another authority", "certificate verify failed"),
        ("ended", "certificate has expired"),
        ("no TLS", ""),
    ],
)
async def test_a_node_does_not_speak_to_a_listener_that_is_not_the_peer(
    authorities: Authorities, kind: str, says: str
) -> None:
    """Node 1 dials, and a stranger has taken node 2's address: it receives nothing, not even a hello."""
    makers: dict[str, Callable[[], Identity | None]] = {
        "node 3": lambda: authorities.node(3),
        "another authority": lambda: authorities.stranger(2),
        "ended": lambda: authorities.node(2, days=-1),
        "no TLS": lambda: None,
    }
    identity = makers[kind]()

    async with with_pair() as pair:
        heard: list[bytes] = []

        async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                heard.append(await reader.read(1))
            writer.close()

        listener = pair._listeners.pop(TWO)
        server = await asyncio.start_server(on_connect, sock=listener, ssl=_listening(identity))
        with capture_logs() as logged:
            handler = pair.start(ONE, node_tls(authorities.node(1), 1))
            assert says in await _refused(logged)
        server.close()
        assert handler.events == []
        assert set(heard) <= {b"", b"\x16"}, "a TLS greeting at most, and never our hello"


async def _refused(logged: list[Any]) -> str:
    """Waits until a node has logged why a connection failed, and returns that reason."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for entry in logged:
                if entry["event"] in ("peer_unreachable", "connection_dropped", "handshake_failed"):
                    return str(entry.get("error") or entry.get("reason"))
            await asyncio.sleep(0.01)


def _listening(identity: Identity | None) -> ssl.SSLContext | None:
    if identity is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    return context


@pytest.mark.parametrize("secure", [ONE, TWO])
async def test_a_node_with_tls_and_one_without_never_open_a_session(authorities: Authorities, secure: NodeId) -> None:
    async with with_pair() as pair:
        with capture_logs() as logged:
            for node in (ONE, TWO):
                pair.start(node, node_tls(authorities.node(node), node) if node == secure else None)
            await _refused(logged)
        assert pair.handlers[ONE].events == pair.handlers[TWO].events == []


# ------------------------------------------------------------------------------------------ unfinished handshakes
async def test_an_unfinished_handshake_is_dropped_in_time(authorities: Authorities) -> None:
    async with with_pair() as pair:
        pair.start(TWO, node_tls(authorities.node(2), 2), TcpSettings(hello_timeout_ms=50))
        assert await pair.read_answer(None, b"\x16\x03\x01") == b"", "the beginning of a TLS record, and no more"


async def test_unfinished_handshakes_keep_no_peer_out(authorities: Authorities) -> None:
    """As many as there are places, and more; none of them would end by itself while the test runs."""

    async with with_pair() as pair:
        settings = TcpSettings(redial_min_ms=1, redial_max_ms=10, hello_timeout_ms=60_000, pending_connections_max=4)
        pair.start(TWO, node_tls(authorities.node(2), 2), settings)
        held = [await asyncio.open_connection(*pair.peers[TWO]) for _ in range(12)]
        for _, writer in held:
            writer.write(b"\x16\x03\x01")
        pair.start(ONE, node_tls(authorities.node(1), 1))
        await pair.both_open()
        for _, writer in held:
            writer.close()


# ------------------------------------------------------------------------------------------------------ reload
async def test_renewed_files_are_used_for_new_connections_and_old_ones_live_on(authorities: Authorities) -> None:
    async with with_pair() as pair:
        tls = node_tls(authorities.node(2), 2)
        pair.start(TWO, tls)
        pair.start(ONE, node_tls(authorities.node(1), 1))
        await pair.both_open()
        before = await _serial(pair)
        authorities.node(2)  # renews it in place
        tls.reload()
        assert await _serial(pair) != before
        assert pair.networks[ONE].is_open(TWO, CONTROL)
        assert pair.handlers[ONE].events.count(("close", TWO, CONTROL)) == 0


async def test_changed_files_are_noticed_by_themselves(
    authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smq.coordinator.tls.contexts._POLL_S", 0.01)

    tls = node_tls(authorities.node(2), 2)
    before = tls.listening
    tls.start()
    authorities.node(2)
    async with asyncio.timeout(PATIENCE_S):
        while tls.listening is before:  # noqa: ASYNC110 - it looks now and then, and so do we
            await asyncio.sleep(0.01)
    tls.stop()


def test_files_that_cannot_be_used_leave_the_old_ones_in_force_until_they_can(authorities: Authorities) -> None:
    identity = authorities.node(2)
    tls = node_tls(identity, 2)
    before, good = tls.listening, identity.certificate.read_bytes()
    for bad in (b"", b"not PEM", authorities.node(7).certificate.read_bytes(), good[: len(good) // 2]):
        identity.certificate.write_bytes(bad)
        tls.reload()
        assert (tls.listening is before, tls.is_reload_failing) == (True, True)
    identity.certificate.write_bytes(good)
    tls.reload()
    assert (tls.listening is before, tls.is_reload_failing) == (False, False)


async def _serial(pair: SecurePair) -> int:
    """Of the certificate that node 2 shows to a new connection."""
    _, writer = await asyncio.open_connection(*pair.peers[TWO], ssl=dialling(None))
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return hash(shown)


# ------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda a: a.node(3), rf"names {node_uri('c', NodeId(3))}, and this is {node_uri('c', NodeId(1))}"),
        (lambda a: a.node(1, cluster_id="d"), "names smq://d/nodes/1"),
        (lambda a: a.client(), "names no node"),
        (lambda a: a.node(1, days=-1), "expired on .*renew it"),
    ],
)
def test_a_node_does_not_start_with_a_certificate_that_peers_would_refuse(
    authorities: Authorities, make: Callable[[Authorities], Identity], says: str
) -> None:
    with pytest.raises(TlsError, match=says):
        node_tls(make(authorities), 1)


def test_missing_or_mixed_up_files_are_named(authorities: Authorities, tmp_path: Path) -> None:
    one, two = authorities.node(1), authorities.node(2)
    good = config_of(one)
    empty = tmp_path / "empty.crt"
    empty.write_text("")
    for changes, says in (
        ({"ca": tmp_path / "absent"}, "cannot read .*absent"),
        ({"key": two.key}, "are not a certificate and its key"),
        ({"ca": empty}, "holds no certificates"),
    ):
        config = type(good)(
            ca=changes.get("ca", good.ca), certificate=good.certificate, key=changes.get("key", good.key)
        )
        with pytest.raises(TlsError, match=says):
            NodeTls(config, cluster_id=CLUSTER_ID, node_id=ONE)


# ---------------------------------------------------------------------------------------------------- smq cert
def _cert(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["cert", *arguments])


def test_printed_commands_name_files_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = 'my "CA"'
    assert _cert("init", home).exit_code == 0
    made = _cert("node", home, "--cluster-id", "c", "--node", "1")
    base = 'node_id = 1\ncluster_id = "c"\ndata_dir = "d"\npeers = {1 = "127.0.0.1:7400"}\n'
    config = parse_config(base + made.stdout, base_dir=Path("/elsewhere"))
    assert config.tls == config_of(node_identity(tmp_path / home, ONE))
    exported = shlex.split(_cert("client", home).stdout)
    client = client_identity(tmp_path / home)
    files = [f"CA={client.ca}", f"CERTIFICATE={client.certificate}", f"KEY={client.key}"]
    assert exported == ["export", *(f"SMQ_TLS_{file}" for file in files)]


def test_certificate_names_any_cluster_that_a_node_may_be_of_and_says_how(tmp_path: Path) -> None:
    home = str(tmp_path)
    assert _cert("init", home).exit_code == 0
    assert " names smq://a%20b%2Fc/nodes/1 " in _cert("node", home, "--cluster-id", "a b/c", "--node", "1").stderr
    NodeTls(config_of(node_identity(tmp_path, ONE)), cluster_id="a b/c", node_id=ONE)
    refused = _cert("node", home, "--cluster-id", "", "--node", "2")
    assert (refused.exit_code, "cluster_id must not be empty" in refused.stderr) == (2, True)
    assert not node_identity(tmp_path, TWO).directory.exists()
