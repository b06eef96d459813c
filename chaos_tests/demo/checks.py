"""The checks of the demo: every replica against every other, and Spark's answers against pandas and the producer.

Each check returns lines with its results, or raises DemoFailure with the difference.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chaos_tests.demo.flights import TOTALS, VALUE_SCHEMA, Flights, totals_by_carrier
from chaos_tests.demo.publish import DemoFailure, Kill, Published
from smq.clients.pb import smq_pb2 as pb
from smq.records import check_crc, parse_header
from smq.testing.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CATCH_UP_S: Final = 60.0  # for a restarted node to fetch what it missed
FETCH_BYTES: Final = 4 << 20
CALL_S: Final = 10.0


# ------------------------------------------------------------------------------------------------ replicas
@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One node's replica of a partition. `epochs` is (base offset, epoch) of each batch."""

    end: int
    batches: int
    size_bytes: int
    digest: str
    epochs: list[tuple[int, int]]


def wait_caught_up(cluster: Cluster, topic: str) -> None:
    """Waits until every node holds every partition durably up to one high water mark, and all digests are equal."""
    give_up_at = time.monotonic() + CATCH_UP_S
    while True:
        statuses = [
            cluster.nodes[node].raw.admin.NodeStatus(pb.NodeStatusRequest(with_digest=True), timeout=CALL_S)
            for node in cluster.nodes
        ]
        seen = {(r.topic, r.partition, r.hwm, r.verified_end) for s in statuses for r in s.replicas if r.topic == topic}
        partitions = {(t, p) for t, p, _, _ in seen}
        is_even = all(hwm == end for _, _, hwm, end in seen) and len(seen) == len(partitions)
        digests = {(s.applied_index, s.digest) for s in statuses}
        if is_even and len(digests) == 1:
            return
        if time.monotonic() > give_up_at:
            raise DemoFailure(
                f"after {CATCH_UP_S:g} s the nodes still differ: {sorted(seen)}; digests {sorted(digests)}"
            )
        time.sleep(0.1)


def read_replica(cluster: Cluster, node: int, topic: str, partition: int) -> Replica:
    """All committed batches of one node's replica; checks CRCs, order and gaplessness."""
    sha = hashlib.sha256()
    position = batches = size = 0
    epochs: list[tuple[int, int]] = []
    for batch in _raw_batches(cluster, node, topic, partition):
        header = parse_header(batch.data)
        check_crc(batch.data, header)
        if header.base_offset != position:
            raise DemoFailure(f"node {node}, {topic}-{partition}: batch at {header.base_offset}, expected {position}")
        sha.update(batch.data)
        sha.update(batch.ts_ns.to_bytes(8, "big"))
        epochs.append((position, header.epoch))
        position, batches, size = header.end, batches + 1, size + len(batch.data)
    return Replica(end=position, batches=batches, size_bytes=size, digest=sha.hexdigest(), epochs=epochs)


def _raw_batches(cluster: Cluster, node: int, topic: str, partition: int) -> Iterator[pb.Batch]:
    position, hwm = 0, 1
    while position < hwm:
        request = pb.FetchRequest(max_bytes=FETCH_BYTES)
        request.partitions.add(topic=topic, partition=partition, offset=position, max_bytes=FETCH_BYTES)
        (part,) = cluster.nodes[node].raw.broker.Fetch(request, timeout=CALL_S).partitions
        if part.HasField("error"):
            raise DemoFailure(f"node {node} does not serve {topic}-{partition} at {position}: {part.error.message}")
        hwm = part.hwm
        if not part.batches and position < hwm:
            raise DemoFailure(f"node {node} has no batch of {topic}-{partition} at {position}, below its mark {hwm}")
        yield from part.batches
        position = part.batches[-1].last_offset + 1 if part.batches else position


def check_replicas(
    cluster: Cluster, topic: str, partition_count: int, published: Published
) -> tuple[list[str], dict[int, Replica]]:
    """Compares every replica with every other, and with the acknowledgements."""
    copies: dict[int, Replica] = {}
    total = 0
    for partition in range(partition_count):
        replicas = {node: read_replica(cluster, node, topic, partition) for node in cluster.nodes}
        if len({replica.digest for replica in replicas.values()}) != 1:
            found = {node: (r.end, r.batches, r.digest[:12]) for node, r in replicas.items()}
            raise DemoFailure(f"{topic}-{partition}: the replicas differ: {found}")
        copies[partition] = next(iter(replicas.values()))
        acked = published.partitions.count(partition)
        if copies[partition].end != acked:
            raise DemoFailure(f"{topic}-{partition} holds {copies[partition].end} records, {acked} were acknowledged")
        total += sum(r.size_bytes for r in replicas.values())
    lines = [
        f"{len(cluster.nodes)} replicas of {partition_count} partitions are byte for byte the same "
        f"({total / 1e6:.0f} MB read raw), every batch's CRC is right, no offset is missing"
    ]
    return lines, copies


def failover_seconds(kill: Kill, published: Published, copies: dict[int, Replica]) -> tuple[float, float]:
    """(first, last): from the kill to the first acknowledgement of a new leader in a partition that the node led.

    The epoch in the stored batch says who wrote it, so that an acknowledgement that the dead node had still sent
    does not count.
    """
    firsts = []
    for partition, epoch in kill.led.items():
        newer = [base for base, e in copies[partition].epochs if e > epoch]
        if newer:
            acks = [a.at_s for a in published.acks if a.partition == partition and a.last >= newer[0]]
            later = [at_s for at_s in acks if at_s > kill.at_s]
            firsts += [min(later) - kill.at_s] if later else []
    if not firsts:
        raise DemoFailure(f"after the kill no new leader wrote to a partition that node {kill.node} had led")
    return min(firsts), max(firsts)


# ------------------------------------------------------------------------------------------------ Spark
class SparkChecks:
    """Reads the topic through format("smq") and compares."""

    def __init__(self, spark: "SparkSession", servers: str, topic: str, flights: Flights, published: Published) -> None:
        self._spark = spark
        self._servers = servers
        self._topic = topic
        self._flights = flights
        self._published = published

    def whole(self) -> list[str]:
        """Compares totals per carrier of the whole topic with pandas."""
        started = time.monotonic()
        totals = self._totals(self._read())
        seconds = time.monotonic() - started
        self._compare("the whole topic", totals, totals_by_carrier(self._flights.frame))
        rows = int(sum(row[0] for row in totals.values()))
        return [
            f"{rows:,} rows, {len(totals)} carriers: flights, distance, air time, delay and flight numbers are equal",
            f"read, parsed and aggregated in {seconds:.1f} s with Spark's warm-up, {rows / seconds:,.0f} rows/s",
        ]

    def offsets(self) -> list[str]:
        """Compares every record's offset with the producer's acknowledgement, and each partition with 0..hwm-1."""
        from pyspark.sql import functions as f

        started = time.monotonic()
        table = self._read().select("partition", "offset", f.crc32("value").alias("crc")).toArrow()
        seconds = time.monotonic() - started
        read = np.stack([table[name].to_numpy() for name in ("partition", "offset", "crc")], axis=1).astype(np.int64)
        crcs = [zlib.crc32(value) for value in self._flights.values]
        acked = np.stack([self._published.partitions, self._published.offsets, crcs], axis=1).astype(np.int64)
        if not np.array_equal(_sorted(read), _sorted(acked)):
            raise DemoFailure(
                f"Spark's records are not those acknowledged: {len(read)} rows read, {len(acked)} acknowledged"
            )
        for partition in np.unique(read[:, 0]):
            offsets = np.sort(read[read[:, 0] == partition, 1])
            if not np.array_equal(offsets, np.arange(len(offsets))):
                raise DemoFailure(f"{self._topic}-{partition}: the offsets are not 0..{len(offsets) - 1}")
        return [
            f"each of {len(read):,} records is at its acknowledged offset, with the bytes that were sent",
            f"offsets are 0..hwm-1 in each partition, no gap, no duplicate ({len(read) / seconds:,.0f} rows/s, warm)",
        ]

    def by_range(self, ends: dict[int, int]) -> list[str]:
        """Reads the middle half of each partition, by startingOffsets and endingOffsets."""
        starts = {p: end // 4 for p, end in ends.items()}
        stops = {p: end - end // 4 for p, end in ends.items()}
        totals = self._totals(
            self._read(startingOffsets=self._json(starts), endingOffsets=self._json(stops)),
        )
        partitions, offsets = np.array(self._published.partitions), np.array(self._published.offsets)
        low = np.array([starts[p] for p in range(len(ends))])[partitions]
        high = np.array([stops[p] for p in range(len(ends))])[partitions]
        chosen = self._flights.frame[(offsets >= low) & (offsets < high)]
        self._compare("the offset range", totals, totals_by_carrier(chosen))
        return [f"{len(chosen):,} rows between startingOffsets and endingOffsets, totals equal"]

    def _read(self, **options: str) -> "DataFrame":
        reader = self._spark.read.format("smq").option("servers", self._servers).option("subscribe", self._topic)
        return reader.options(**options).load()

    def _totals(self, frame: "DataFrame") -> dict[str, tuple[float, ...]]:
        from pyspark.sql import functions as f

        row = f.from_json(f.col("value").cast("string"), VALUE_SCHEMA)
        parsed = frame.select(f.col("key").cast("string").alias("key"), row.alias("row"))
        aggregates: list[Any] = [getattr(f, how)(f"row.{column}") for column, how in TOTALS.items()]
        agreeing = f.count(f.when(f.col("row.carrier") == f.col("key"), 1))
        rows = parsed.groupBy("key").agg(agreeing, *aggregates).collect()
        return {r[0]: tuple(float(x or 0) for x in r[1:]) for r in rows}

    def _json(self, offsets: dict[int, int]) -> str:
        return json.dumps({self._topic: {str(p): offset for p, offset in offsets.items()}})

    @staticmethod
    def _compare(what: str, found: dict[str, tuple[float, ...]], expected: dict[str, tuple[float, ...]]) -> None:
        wrong = {
            c: (found.get(c), expected.get(c))
            for c in found.keys() | expected.keys()
            if found.get(c) != expected.get(c)
        }
        if wrong:
            raise DemoFailure(f"{what}: (Spark, pandas) differ for {wrong}")


def _sorted(rows: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
    return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
