"""The certificates of all ports of a node: its own, and those of listeners that have another.

Owns which port shows which, and that all of them are read again together. Only the composition root makes one.
"""

import ssl
from collections.abc import Callable, Iterator
from functools import partial

import grpc

from smq.coordinator.config.certificate_users import CertificateUsers
from smq.coordinator.config.node_toml import ListenerConfig, ServerConfig, TlsConfig
from smq.coordinator.tls.contexts import ClientTls, NodeTls, load_tls, verify_mode
from smq.coordinator.tls.loading import TlsError
from smq.coordinator.user_errors import StartError

Contexts = Callable[[], ssl.SSLContext]  # asked at each handshake


class PortTls:
    """StartError if files are unusable. `node` is None without [tls], and then every port is plain."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.node: NodeTls | None = load_tls(config.tls, cluster_id=config.cluster_id, node_id=config.node_id)
        self.listeners: dict[str, ClientTls] = {}
        for name, way in config.listeners.items():
            tls = config.tls_of(way)
            if tls is not None and way.certificate is not None:
                self.listeners[name] = _load(name, tls)

    def contexts(self, way: ListenerConfig) -> Contexts | None:
        """For the Kafka port of this listener; None if it is plain. Where a user is asked for, a certificate is only if
        the listener itself says so."""
        need = (ssl.CERT_REQUIRED if way.client_certificates else ssl.CERT_NONE) if way.sasl else None
        return self._contexts(way.name, self._config.tls_of(way), need)

    def http(self, need: ssl.VerifyMode) -> Contexts | None:
        return self._contexts("", self._config.http_tls, need)

    def credentials(self, way: ListenerConfig) -> grpc.ServerCredentials | None:
        """For the gRPC port of this listener; None if it is plain. Of users it asks as the Kafka port does."""
        tls, served = self._config.tls_of(way), self._served(way.name)
        if tls is None or served is None:
            return None
        need = bool(way.client_certificates) if way.sasl else tls.client_certificates
        return served.grpc_credentials(client_certificates=need)

    def users(self, way: ListenerConfig) -> CertificateUsers | None:
        """If the ports of this listener take a certificate for a user's."""
        tls = self._config.tls_of(way)
        if tls is None or not tls.certificate_users or way.sasl:
            return None
        return CertificateUsers(tls.certificate_users)

    def start(self) -> None:
        for tls in self._all():
            tls.start()

    def stop(self) -> None:
        for tls in self._all():
            tls.stop()

    def reload(self) -> None:
        for tls in self._all():
            tls.reload()

    def _contexts(self, name: str, tls: TlsConfig | None, need: ssl.VerifyMode | None) -> Contexts | None:
        served = self._served(name)
        if tls is None or served is None:
            return None
        return partial(served.clients, verify_mode(tls) if need is None else need)

    def _served(self, name: str) -> ClientTls | None:
        return self.listeners.get(name, self.node)

    def _all(self) -> Iterator[ClientTls]:
        if self.node is not None:
            yield self.node
        yield from self.listeners.values()


def _load(name: str, tls: TlsConfig) -> ClientTls:
    try:
        return ClientTls(tls)
    except TlsError as e:
        raise StartError(f"[listeners.{name}]: {e}") from e
