"""Shared by the Spark tests: numbered records to publish, the offsets in a DataFrame, and what is staged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from pyspark.sql import DataFrame

from smq.clients.pb import smq_pb2 as pb
from smq.records import NewRecord, encode_batch
from smq.spark_connector import decode, range_fetcher
from smq.testing.cluster import Cluster

# Spark gives its Python ten seconds to start, and no setting changes that; on a busy machine it takes longer. The
# operator of a job starts it again.
SLOW_START = "Timed out while waiting for the Python worker to connect back"


def numbered(count: int, first: int = 0) -> list[NewRecord]:
    """Record i has the value b"v<i>" and the create time 1000 + i ms."""
    return [
        NewRecord(key=b"k%d" % (i % 5), value=b"v%d" % i, timestamp_ms=1000 + i) for i in range(first, first + count)
    ]


def publisher(cluster: Cluster) -> Callable[..., None]:
    """Appends records to a partition, acks=all, in batches of `batch_records`."""

    def append(
        topic: str, partition: int, records: Sequence[NewRecord], codec: str = "none", batch_records: int = 500
    ) -> None:
        for start in range(0, len(records), batch_records):
            batch = encode_batch(records[start : start + batch_records], codec=codec)
            cluster.publish_batch(topic, partition, batch)

    return append


def offsets(frame: DataFrame) -> list[tuple[int, int]]:
    """(partition, offset) of every row, in order."""
    rows = frame.select("partition", "offset").collect()
    return sorted((row["partition"], row["offset"]) for row in rows)


def span(partition: int, lo: int, hi: int) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in range(lo, hi)]


def open_transactions(cluster: Cluster) -> list[str]:
    """The transactional ids of what is staged and neither committed nor aborted."""
    node = cluster.alive()[0].raw
    listed = node.call(node.admin.ListTransactions, pb.ListTransactionsRequest())
    return [t.transactional_id for t in listed.transactions if t.state == "Ongoing"]


@contextmanager
def small_answers() -> Iterator[None]:
    """Makes the readers of this process fetch and send little at a time, so that a short read takes many fetches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_fetcher, "FETCH_BYTES", 20_000)
        patch.setattr(decode, "ROWS_PER_BATCH", 1_000)
        yield
