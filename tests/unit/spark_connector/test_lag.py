"""Lag as gauges, from progress as Spark reports it."""

import json
import sys
import uuid

import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryTerminatedEvent, StreamingQueryProgress

from smq.spark_connector.stream.lag import PrometheusLag

QUERY = "0c7e7f36-4a41-4a0e-9a2b-6f0b0c1d2e3f"


def progress(name: str | None, end: dict[str, int], latest: dict[str, int], query: str = QUERY) -> QueryProgressEvent:
    """The progress of one micro-batch, as reported by a Spark 4 query that reads smq, with other positions."""

    def position(offsets: dict[str, int]) -> str:
        return json.dumps({"ids": {"t": "5f"}, "o": {"t": offsets}, "v": 1})

    source: dict[str, object] = {
        "description": "smq",
        "startOffset": None,
        "endOffset": position(end),
        "latestOffset": position(latest),
        "numInputRows": 3,
        "inputRowsPerSecond": 0.0,
        "processedRowsPerSecond": 30.0,
        "metrics": {},
    }
    progress = {
        "id": query,
        "runId": str(uuid.uuid4()),
        "name": name,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": 4,
        "batchDuration": 100,
        "durationMs": {"triggerExecution": 100},
        "eventTime": {},
        "stateOperators": [],
        "sources": [source, {**source, "endOffset": '{"logOffset":3}', "latestOffset": None}],
        "sink": {"description": "noop", "numOutputRows": -1, "metrics": {}},
        "numInputRows": 3,
        "inputRowsPerSecond": 0.0,
        "processedRowsPerSecond": 30.0,
        "observedMetrics": {},
    }
    return QueryProgressEvent(StreamingQueryProgress.fromJson(progress))


def ended(query: str = QUERY) -> QueryTerminatedEvent:
    return QueryTerminatedEvent.fromJson(
        {"id": query, "runId": str(uuid.uuid4()), "exception": None, "errorClassOnException": None}
    )


def shown(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    return {
        (s.labels["query"], s.labels["topic"], s.labels["partition"]): s.value
        for metric in registry.collect()
        for s in metric.samples
        if s.name == "smq_spark_lag_records"
    }


def test_lag_of_each_partition_is_a_gauge() -> None:
    registry = CollectorRegistry()
    listener = PrometheusLag(registry)
    listener.onQueryProgress(progress("flights", {"0": 10, "1": 5}, {"0": 25, "1": 5}))
    assert shown(registry) == {("flights", "t", "0"): 15, ("flights", "t", "1"): 0}
    listener.onQueryProgress(progress("flights", {"0": 25, "1": 5}, {"0": 26, "1": 5}))
    assert shown(registry)["flights", "t", "0"] == 1


def test_query_without_a_name_is_labelled_with_its_id() -> None:
    registry = CollectorRegistry()
    PrometheusLag(registry).onQueryProgress(progress(None, {"0": 1}, {"0": 2}))
    assert shown(registry) == {(QUERY, "t", "0"): 1}


def test_series_end_with_their_query_and_with_their_partition() -> None:
    registry = CollectorRegistry()
    listener = PrometheusLag(registry)
    other = str(uuid.uuid4())
    listener.onQueryProgress(progress("a", {"0": 1, "1": 1}, {"0": 2, "1": 2}))
    listener.onQueryProgress(progress("b", {"0": 1}, {"0": 5}, query=other))
    listener.onQueryProgress(progress("a", {"0": 2}, {"0": 2}))
    assert shown(registry) == {("a", "t", "0"): 0, ("b", "t", "0"): 4}
    listener.onQueryTerminated(ended(other))
    assert shown(registry) == {("a", "t", "0"): 0}
    listener.onQueryTerminated(ended(other))


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RuntimeError, match="pip install prometheus-client"):
        PrometheusLag()
