"""A server's certificates: read from the files of [tls], read again when these change; and when they expire.

Owns the contexts of every TLS listener and of the connections to other nodes. A change takes effect for the next
connection. If new files are unusable, the old ones stay in force, and an error is logged. It must never write a file.
`tls.port_tls` makes them.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from smq.coordinator.config.node_toml import TlsConfig
from smq.coordinator.tls.loading import TlsError, load_context
from smq.coordinator.user_errors import StartError
from smq.raft_state.ids import NodeId
from smq.replication.net.peer_tls import node_uri

if TYPE_CHECKING:
    from cryptography import x509

log = structlog.get_logger(__name__)

_POLL_S: Final = 5.0  # between two checks of the files: three stat calls
_SOON_S: Final = 14 * 86_400  # an earlier expiry is a warning at every start and change


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """The contexts of both sides of a connection between nodes."""

    listening: ssl.SSLContext
    dialling: ssl.SSLContext


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """One consistent reading of the files."""

    clients: Mapping[ssl.VerifyMode, ssl.SSLContext]
    grpc: grpc.ServerCertificateConfiguration
    ends_s: float  # Unix time; of the certificate
    ca_ends_s: float  # of the authority that signed it if that is trusted, otherwise of the last trusted one
    nodes: _Nodes | None = None


class ClientTls:
    """The certificate that ports for clients show. TlsError if the files are unusable at the start."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._seen = self._stamps()
        self._now = self._load()
        self._failure = ""
        self._watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------ contexts
    def clients(self, need: ssl.VerifyMode) -> ssl.SSLContext:
        """For the client ports, except gRPC's. With CERT_OPTIONAL a client may show a certificate, and need not."""
        return self._now.clients[need]

    def grpc_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Credentials that ask for the certificates at every handshake, on a thread of gRPC's own."""
        served = self._now.grpc

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            if self._now.grpc is served:
                return None
            served = self._now.grpc
            return served

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._now.grpc,
            fetch,  # type: ignore[arg-type] # None means unchanged, which the stubs do not know
            require_client_authentication=client_certificates,
        )
        return credentials

    # ------------------------------------------------------------------------------------------------- status
    @property
    def ends_s(self) -> float:
        """Unix time at which the certificate expires."""
        return self._now.ends_s

    @property
    def ca_ends_s(self) -> float:
        return self._now.ca_ends_s

    @property
    def is_reload_failing(self) -> bool:
        """The files have changed to something unusable."""
        return bool(self._failure)

    # ------------------------------------------------------------------------------------------------- reload
    def start(self) -> None:
        """Checks the files now and then, while the loop runs."""
        self._watch = asyncio.get_running_loop().create_task(self._watch_for_ever())

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def reload(self) -> None:
        """Reads the files again, changed or not. Unusable files are logged once, and tried again at each check."""
        seen = self._stamps()
        try:
            self._now = self._load()
        except TlsError as e:
            if str(e) != self._failure:
                log.error("tls_reload_failed", error=str(e), in_force_until=_date(self._now.ends_s))
            self._failure = str(e)
            return
        self._seen, self._failure = seen, ""
        log.info("tls_reloaded", certificate_ends=_date(self.ends_s), ca_ends=_date(self.ca_ends_s))

    async def _watch_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self._stamps() != self._seen:
                self.reload()

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever one of the files changes, through symbolic links too."""
        return tuple(_stamp(path) for path in (self._config.ca, self._config.certificate, self._config.key))

    # --------------------------------------------------------------------------------------------------- load
    def _load(self) -> _Loaded:
        config = self._config
        ca, certificate, key = (_read(path) for path in (config.ca, config.certificate, config.key))
        own = _parse(config.certificate, certificate)
        self._check_own(own[0])
        return _Loaded(
            clients={need: _client_context(config, need) for need in ssl.VerifyMode},
            grpc=grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca),
            ends_s=own[0].not_valid_after_utc.timestamp(),
            ca_ends_s=_end_of_issuer(own[0], _parse(config.ca, ca)),
        )

    def _check_own(self, own: "x509.Certificate") -> None:
        """TlsError for a certificate that is not valid now."""
        path = self._config.certificate
        now = datetime.now(UTC)
        if now > own.not_valid_after_utc:
            raise TlsError(f"{path} expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it")
        if now < own.not_valid_before_utc:
            raise TlsError(f"{path} is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: check the clock")
        if own.not_valid_after_utc.timestamp() - now.timestamp() < _SOON_S:
            log.warning("tls_certificate_expires_soon", certificate=str(path), ends=own.not_valid_after_utc.isoformat())


class NodeTls(ClientTls):
    """The node's own, which names it to the other nodes. Implements smq.replication.net.peer_tls.PeerContexts."""

    def __init__(self, config: TlsConfig, *, cluster_id: str, node_id: NodeId) -> None:
        self._name = node_uri(cluster_id, node_id)
        super().__init__(config)

    @property
    def listening(self) -> ssl.SSLContext:
        return self._nodes.listening

    @property
    def dialling(self) -> ssl.SSLContext:
        return self._nodes.dialling

    @property
    def _nodes(self) -> _Nodes:
        assert self._now.nodes is not None  # loaded below
        return self._now.nodes

    def _load(self) -> _Loaded:
        loaded = super()._load()
        nodes = _Nodes(
            listening=load_context(self._config, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED),
            dialling=load_context(self._config, ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED),
        )
        return replace(loaded, nodes=nodes)

    def _check_own(self, own: "x509.Certificate") -> None:
        """TlsError also for a certificate with which no peer would admit this node."""
        from cryptography import x509

        try:
            names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except (x509.ExtensionNotFound, ValueError):
            uris = []
        if self._name not in uris:
            raise TlsError(
                f"{self._config.certificate} names {', '.join(uris) or 'no node'}, and this is {self._name}: make one "
                "that names it, with `smq cert node` or with this URI among its subject alternative names"
            )
        super()._check_own(own)


def load_tls(config: TlsConfig | None, *, cluster_id: str, node_id: NodeId) -> NodeTls | None:
    """For a server that starts: StartError if the files are unusable, None if there is no [tls]."""
    if config is None:
        return None
    try:
        return NodeTls(config, cluster_id=cluster_id, node_id=node_id)
    except TlsError as e:
        raise StartError(f"[tls]: {e}") from e


def verify_mode(config: TlsConfig) -> ssl.VerifyMode:
    """What a listener with these settings asks of its clients."""
    return ssl.CERT_REQUIRED if config.client_certificates else ssl.CERT_NONE


def _client_context(config: TlsConfig, need: ssl.VerifyMode) -> ssl.SSLContext:
    context = load_context(config, ssl.PROTOCOL_TLS_SERVER, need)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # not all clients are ours
    return context


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise TlsError(f"cannot read {path}: {e.strerror or e}") from e


def _parse(path: Path, pem: bytes) -> "list[x509.Certificate]":
    from cryptography import x509  # slow to import, and a node without TLS needs none of it

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as e:
        raise TlsError(f"{path} holds no PEM certificate: {e}") from e


def _end_of_issuer(own: "x509.Certificate", trusted: "list[x509.Certificate]") -> float:
    issuers = [ca for ca in trusted if ca.subject == own.issuer] or trusted
    return max(ca.not_valid_after_utc.timestamp() for ca in issuers)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
