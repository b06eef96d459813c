"""The lag of a query, computed from the progress that Spark reports, passed to a listener, and as Prometheus gauges.

Owns the lag of a query's smq sources, the gauges' names and the life of each series. It must never ask the cluster:
with each micro-batch the stream reader reports the end of the readable records to Spark (`reportLatestOffset`). Runs on
the driver; a user's program serves the registry, for instance by
`prometheus_client.start_http_server(9108, "127.0.0.1")`.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from smq.spark_connector.errors import CheckpointError
from smq.spark_connector.read_bounds import PartitionKey
from smq.spark_connector.stream.stream_offset import StreamOffset

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LABELS: Final = ("query", "topic", "partition")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLag:
    """Unread records of each partition when the query's last micro-batch was planned."""

    query_id: str
    name: str | None
    batch_id: int
    records: Mapping[PartitionKey, int]

    @property
    def total(self) -> int:
        return sum(self.records.values())


def lag_of(progress: StreamingQueryProgress) -> QueryLag | None:
    """None if the query has no smq source, or no micro-batch has been planned yet."""
    records: dict[PartitionKey, int] = {}
    is_ours = False
    for source in progress.sources:
        end, latest = _offset(source.endOffset), _offset(source.latestOffset)
        if end is None or latest is None:
            continue
        is_ours = True
        for key, offset in latest.next_offsets.items():
            records[key] = max(0, offset - end.next_offsets.get(key, offset))
    if not is_ours:
        return None
    return QueryLag(query_id=str(progress.id), name=progress.name, batch_id=progress.batchId, records=records)


def _offset(text: str | None) -> StreamOffset | None:
    """None for the position of another source."""
    try:
        value = json.loads(text) if text else None
        return StreamOffset.of_json(value) if isinstance(value, dict) else None
    except (ValueError, CheckpointError):
        return None


def log_lag(lag: QueryLag) -> None:
    log.info("query %s, micro-batch %d: %d records behind", lag.name or lag.query_id, lag.batch_id, lag.total)


class LagListener(StreamingQueryListener):
    """`spark.streams.addListener(LagListener(publish))`: calls `publish` with each progress of a query that reads smq.

    `publish` runs on one of Spark's threads and must not block; by default the lag is logged.
    """

    def __init__(self, publish: Callable[[QueryLag], None] = log_lag) -> None:
        self._publish = publish

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        lag = lag_of(event.progress)
        if lag is not None:
            self._publish(lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing has changed."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Its last progress has been reported."""


class PrometheusLag(LagListener):
    """`spark.streams.addListener(PrometheusLag())`: `smq_spark_lag_records{query, topic, partition}`, as of each
    query's last micro-batch. The series of a query end with it: a constant gauge would look healthy.

    `query` is the query's name, or its id. RuntimeError if prometheus-client is not installed.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        try:
            from prometheus_client import REGISTRY, Gauge
        except ImportError as e:
            raise RuntimeError("PrometheusLag needs prometheus-client: pip install prometheus-client") from e
        description = "Records that the query has yet to read, as of its last micro-batch"
        self._gauge: Final = Gauge("smq_spark_lag_records", description, _LABELS, registry=registry or REGISTRY)
        self._series: dict[str, set[tuple[str, str, str]]] = {}  # by query id
        self._lock = threading.Lock()  # events of different queries may arrive on different threads
        super().__init__(self._show)

    def _show(self, lag: QueryLag) -> None:
        shown = {
            (lag.name or lag.query_id, topic, str(partition)): records
            for (topic, partition), records in lag.records.items()
        }
        with self._lock:
            for gone in self._series.get(lag.query_id, set()) - shown.keys():
                self._gauge.remove(*gone)
            self._series[lag.query_id] = set(shown)
            for labels, records in shown.items():
                self._gauge.labels(*labels).set(records)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._lock:
            for labels in self._series.pop(str(event.id), set()):
                self._gauge.remove(*labels)
