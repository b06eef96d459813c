"""The lag of this session's queries as Prometheus gauges.

Owns the gauges' names and the life of each series; `stream.lag` computes the lag. Runs on the driver; a user's program
serves the registry, for instance by `prometheus_client.start_http_server(9108, "127.0.0.1")`.
"""

import threading
from typing import TYPE_CHECKING, Final

from pyspark.sql.streaming.listener import QueryTerminatedEvent

from smq.spark_connector.stream.lag import LagListener, QueryLag

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_LABELS: Final = ("query", "topic", "partition")


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
