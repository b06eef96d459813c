"""Metrics of what stands between the node and the network: connections and certificates.

Owns names and labels. Only the composition root makes one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smq.coordinator.tls.contexts import NodeTls
from smq.replication.net.acceptor import AcceptCounts


class Doors(Protocol):
    """Who counts the connections of one port."""

    counts: AcceptCounts

    @property
    def open(self) -> int: ...


class DoorCollector(Collector):
    """`doors` by the name of their port."""

    def __init__(self, doors: Mapping[str, Doors], tls: NodeTls | None) -> None:
        self._doors = doors
        self._tls = tls

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        labels = ("port",)
        opened = GaugeMetricFamily("smq_connections", "Connections that are open.", labels=labels)
        refused = CounterMetricFamily("smq_connections_refused", "Connections beyond a limit.", labels=labels)
        failed = CounterMetricFamily("smq_handshakes_failed", "TLS handshakes that did not end well.", labels=labels)
        for port, door in self._doors.items():
            opened.add_metric((port,), door.open)
            refused.add_metric((port,), door.counts.refused)
            failed.add_metric((port,), door.counts.handshakes_failed)
        yield from (opened, refused, failed)
        if self._tls is not None:
            yield from _tls_metrics(self._tls)


def _tls_metrics(tls: NodeTls) -> Iterator[Metric]:
    ends = GaugeMetricFamily(
        "smq_tls_certificate_end_timestamp_seconds", "When the certificate in use ends (Unix time).", labels=("of",)
    )
    ends.add_metric(("node",), tls.ends_s)
    ends.add_metric(("ca",), tls.ca_ends_s)
    yield ends
    yield GaugeMetricFamily(
        "smq_tls_reload_failing",
        "1 where the files have changed to something that cannot be used: the old ones are in force.",
        value=int(tls.is_reload_failing),
    )
