"""How many connections each port may have, given the file descriptors that this process may open.

Owns the division: the disk and the other nodes come first, and clients share the rest. Otherwise clients could take
every descriptor, the node could neither open its journal nor answer a peer, and the cluster would lose it. The
composition root imports it.
"""

import resource
from dataclasses import dataclass

import structlog

from smq.coordinator import limits
from smq.coordinator.user_errors import StartError
from smq.replication.net.acceptor import AcceptLimits

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCaps:
    """The most connections of clients, per port. `descriptor_max` is the first descriptor number beyond theirs."""

    grpc: int
    kafka: int
    http: int
    descriptor_max: int

    @property
    def grpc_per_address(self) -> int:
        return min(limits.GRPC_CONNECTIONS_PER_ADDRESS_MAX, self.grpc)

    def kafka_limits(self, ports: int) -> AcceptLimits:
        """Of each of several ports: an equal part."""
        most = max(1, self.kafka // max(1, ports))
        per_address = min(limits.KAFKA_CONNECTIONS_PER_ADDRESS_MAX, most)
        return AcceptLimits(connections_max=most, per_address_max=per_address, descriptor_max=self.descriptor_max)

    @property
    def http_limits(self) -> AcceptLimits:
        per_address = min(limits.HTTP_CONNECTIONS_PER_ADDRESS_MAX, self.http)
        return AcceptLimits(connections_max=self.http, per_address_max=per_address, descriptor_max=self.descriptor_max)


def divide(descriptors: int) -> ConnectionCaps:
    """StartError if there are too few. If the caps do not all fit, each is cut in the same proportion."""
    if descriptors < limits.DESCRIPTORS_MIN:
        raise StartError(
            f"this process may open only {descriptors} files, and a node needs {limits.DESCRIPTORS_MIN} plus one per "
            "client connection: raise the limit (ulimit -n, LimitNOFILE= of systemd)"
        )
    rest = descriptors - limits.DESCRIPTORS_RESERVED
    caps = (limits.GRPC_CONNECTIONS_MAX, limits.KAFKA_CONNECTIONS_MAX, limits.HTTP_CONNECTIONS_MAX)
    scale = min(1.0, rest / sum(caps))
    grpc, kafka, http = (max(1, int(cap * scale)) for cap in caps)
    return ConnectionCaps(grpc=grpc, kafka=kafka, http=http, descriptor_max=rest)


def take_descriptors() -> ConnectionCaps:
    """Raises this process's limit as far as allowed, and divides it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _descriptors_needed()
    if soft < needed:
        soft = min(needed, hard) if hard != resource.RLIM_INFINITY else needed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    caps = divide(soft)
    if soft < needed:
        log.warning(
            "few_file_descriptors",
            limit=soft,
            needed=needed,
            grpc_connections_max=caps.grpc,
            kafka_connections_max=caps.kafka,
            advice="raise the hard limit of open files (ulimit -Hn, LimitNOFILE= of systemd) for more connections",
        )
    return caps


def _descriptors_needed() -> int:
    caps = limits.GRPC_CONNECTIONS_MAX + limits.KAFKA_CONNECTIONS_MAX + limits.HTTP_CONNECTIONS_MAX
    return caps + limits.DESCRIPTORS_RESERVED
