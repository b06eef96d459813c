"""What a scrape reads beside the node itself: the counters and histograms of the process, and its connections.

Owns the translation from the plain numbers of `replication.monitoring.measures` (units, cumulative buckets, labels),
and the names and labels of the metrics of connections, certificates and damage on the links between nodes. Only the
composition root makes collectors.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from smq.coordinator.tls.contexts import ClientTls, NodeTls
from smq.coordinator.tls.port_tls import PortTls
from smq.raft_state.ids import NodeId
from smq.replication.monitoring.measures import Counter, Histogram, all_instruments
from smq.replication.net.acceptor import AcceptCounts


class InstrumentCollector(Collector):
    """`groups` are dataclasses of instruments."""

    def __init__(self, groups: Iterable[object]) -> None:
        self._instruments = all_instruments(groups)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield family_of(instrument)


def family_of(instrument: Counter | Histogram) -> Metric:
    """The instrument as it is now."""
    if isinstance(instrument, Counter):
        counter = CounterMetricFamily(instrument.name, instrument.text, labels=instrument.labels)
        for labels, count in instrument.values.items():
            counter.add_metric(labels, count)
        return counter
    histogram = HistogramMetricFamily(instrument.name, instrument.text, labels=instrument.labels)
    bounds = [*(f"{bound / instrument.divisor:g}" for bound in instrument.bounds), "+Inf"]
    for labels, series in list(instrument.rows.items()):
        buckets = list(zip(bounds, accumulate(series.buckets), strict=True))
        histogram.add_metric(labels, buckets, sum_value=series.total / instrument.divisor)
    return histogram


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
