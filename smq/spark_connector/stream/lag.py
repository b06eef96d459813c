"""The lag of a query, computed from the progress that Spark reports, and passed to a listener.

Owns the lag of a query's smq sources. It must never ask the cluster: with each micro-batch the stream reader reports
the end of the readable records to Spark (`reportLatestOffset`). Runs on the driver.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
