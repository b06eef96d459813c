"""Metrics of the node's connections and certificates, and of damage on the links between nodes.

Owns names and labels. Only the composition root makes one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smq.coordinator.tls.contexts import ClientTls, NodeTls
from smq.coordinator.tls.port_tls import PortTls
from smq.raft_state.ids import NodeId
from smq.replication.net.acceptor import AcceptCounts


class PortConnections(Protocol):
    """Counts the connections of one port."""

    counts: AcceptCounts

    @property
    def open(self) -> int: ...


class ConnectionCollector(Collector):
    """`ports` maps a port's name to its connections, `damaged_frames` a peer to the frames of it that failed their
    CRC."""

    def __init__(
        self, ports: Mapping[str, PortConnections], damaged_frames: Mapping[NodeId, int], tls: PortTls | None
    ) -> None:
        self._ports = ports
        self._damaged_frames = damaged_frames
        self._tls = tls

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        labels = ("port",)
        opened = GaugeMetricFamily("smq_connections", "Open connections.", labels=labels)
        refused = CounterMetricFamily("smq_connections_refused", "Connections refused beyond a limit.", labels=labels)
        failed = CounterMetricFamily("smq_handshakes_failed", "TLS handshakes that failed.", labels=labels)
        for port, connections in self._ports.items():
            opened.add_metric((port,), connections.open)
            refused.add_metric((port,), connections.counts.refused)
            failed.add_metric((port,), connections.counts.handshakes_failed)
        damaged = CounterMetricFamily(
            "smq_peer_frames_damaged",
            "Frames from a peer that failed their CRC; each ended a session.",
            labels=("peer",),
        )
        for peer, count in self._damaged_frames.items():
            damaged.add_metric((str(peer),), count)
        yield from (opened, refused, failed, damaged)
        if self._tls is not None and self._tls.node is not None:
            yield from _tls_metrics(self._tls.node, self._tls.listeners)


def _tls_metrics(tls: NodeTls, listeners: Mapping[str, ClientTls]) -> Iterator[Metric]:
    ends = GaugeMetricFamily(
        "smq_tls_certificate_end_timestamp_seconds", "When the certificate in use expires (Unix time).", labels=("of",)
    )
    ends.add_metric(("node",), tls.ends_s)
    ends.add_metric(("ca",), tls.ca_ends_s)
    for name, served in listeners.items():
        ends.add_metric((f"listener {name}",), served.ends_s)
    yield ends
    yield GaugeMetricFamily(
        "smq_tls_reload_failing",
        "1 if the files have changed to something unusable: the old ones stay in force.",
        value=int(any(served.is_reload_failing for served in (tls, *listeners.values()))),
    )
