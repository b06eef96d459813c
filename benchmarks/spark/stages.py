"""The time per row in Spark's Python workers: fetching and decoding measured separately, without Spark.

Owns the profile behind the table of reads.py, as CPU time of this process: records of one size and of mixed
sizes, all columns and one, by codec.
"""

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from pyspark.sql.types import StructType

from benchmarks.report import Report
from smq.clients.sync import SyncProducer
from smq.spark_connector.cluster_calls import Cluster as Connections
from smq.spark_connector.decode import Decoder, RawBatch
from smq.spark_connector.planning import Range
from smq.spark_connector.range_fetcher import RangeFetcher
from smq.spark_connector.schema import arrow_schema, check_projection, default_schema
from smq.testing.cluster import Cluster

REPEATS: Final = 3
CHUNK: Final = 10_000  # records handed to the producer in one call
TIMEOUT_MS: Final = 60_000
# Codec and range of sizes; values compress to half their size, as text does.
KINDS: Final = {
    "100 B": ("none", (100, 100)),
    "100 B, lz4": ("lz4", (100, 100)),
    "100 B, zstd": ("zstd", (100, 100)),
    "50-150 B": ("none", (50, 150)),
}
ALL: Final = default_schema(include_headers=False, include_index=False)
VALUE: Final = StructType([field for field in ALL.fields if field.name == "value"])


def measure(cluster: Cluster, report: Report, *, records: int) -> None:
    """Runs each stage REPEATS times; the best run counts."""
    connections = Connections([node.grpc for node in cluster.alive()], TIMEOUT_MS)
    try:
        for kind, (codec, sizes) in KINDS.items():
            topic = _fill(cluster, records, codec, sizes)
            view = connections.layout().views[topic, 0]
            wanted = Range(topic=topic, topic_id=view.topic_id, partition=0, lo=0, hi=view.hi, replicas=view.replicas)
            fetch = partial(RangeFetcher, connections, wanted, fail_on_data_loss=True)
            kept = list(fetch())
            _stage(report, f"fetch, {kind}", records, fetch)
            for columns, schema in (("all seven columns", ALL), ("the value alone", VALUE)):
                _stage(report, f"decode {columns}, {kind}", records, partial(_decode, kept, schema))
    finally:
        connections.close()


def _fill(cluster: Cluster, records: int, codec: str, sizes: tuple[int, int]) -> str:
    topic = cluster.make_topic(1)
    chosen = random.Random(7)
    values = [os.urandom(chosen.randint(*sizes) // 2).hex().encode() for _ in range(CHUNK)]
    with SyncProducer([node.grpc for node in cluster.alive()], compression=codec) as producer:
        for at in range(0, records, CHUNK):
            producer.send_many(topic, values[: min(CHUNK, records - at)], partition=0)
    return topic


def _decode(batches: Iterable[RawBatch], schema: StructType) -> Iterator[object]:
    decoder = Decoder("t", 0, check_projection(schema), arrow_schema(schema))
    for batch in batches:
        yield from decoder.add(batch, 0, batch.header.end)
    yield from decoder.flush()


def _stage(report: Report, what: str, records: int, work: Callable[[], Iterable[object]]) -> None:
    spent = []
    for _ in range(REPEATS):  # the first run warms up
        began = time.process_time()
        for _ in work():
            pass
        spent.append(time.process_time() - began)
    each_ns = min(spent) / records * 1e9
    report.add(what, f"{each_ns:.0f} ns of CPU time a row", cpu_ns_per_row=each_ns, rows=records)
