"""A topic with the gaps of a compaction, read by Spark and exported: each record that is left once, at its offset."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from smq.clients.pb import smq_pb2 as pb
from smq.records import NewRecord
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.spark.file_job import Job
from tests.spark.support import offsets, publisher

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(400)]

COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
COMPACTED_S = 90  # on a busy machine; a node looks at one partition after the other
COUNT = 1_000
PARTITIONS = 2
LONELY = 90  # each record of this number, and its multiples, is the only one of its key
KEYS = 5
GAP = 100  # an offset without a record
LEFT = [*range(0, COUNT, LONELY), *range(COUNT - KEYS, COUNT)]  # of each partition; 990 is in the first part
PLACES = [(partition, offset) for partition in range(PARTITIONS) for offset in LEFT]


def value(offset: int) -> bytes:
    return b"v%d" % offset


def records() -> list[NewRecord]:
    keys = (b"only %d" % n if n % LONELY == 0 else b"k%d" % (n % KEYS) for n in range(COUNT))
    return [NewRecord(key, value(n), 1_000 + n) for n, key in enumerate(keys)]


class Compacted:
    """The topic, and the append time that the record at GAP had."""

    def __init__(self, cluster: Cluster, topic: str, publish: Callable[..., None]) -> None:
        self.cluster, self.topic = cluster, topic
        for partition in range(PARTITIONS):
            publish(topic, partition, records(), batch_records=70)
        self.gap_ts_ns = self.first(pb.EXACT_OFFSET, GAP).ts_ns
        node = cluster.alive()[0].raw
        node.call(node.admin.AlterTopic, pb.AlterTopicRequest(name=topic, set=COMPACTED, request_id=b"c" * 16))
        wait_for("the topic is compacted", lambda: self.places() == PLACES, COMPACTED_S)

    def subscribe(self, partition: int, offset_type: pb.OffsetType.ValueType, **start: int) -> list[pb.Record]:
        node = self.cluster.alive()[0].raw
        answers = node.subscribe(
            topic=self.topic, partition=partition, offset_type=offset_type, stop_at_end=True, **start
        )
        return [record for answer in answers for record in answer.records]

    def first(self, offset_type: pb.OffsetType.ValueType, at: int) -> pb.Record:
        """Of the first partition."""
        return self.subscribe(0, offset_type, offset_value=at)[0]

    def places(self) -> list[tuple[int, int]]:
        return [
            (partition, record.offset)
            for partition in range(PARTITIONS)
            for record in self.subscribe(partition, pb.RESET_TO_EARLIEST)
        ]


@pytest.fixture(scope="module")
def compacted(cluster: Cluster) -> Compacted:
    return Compacted(cluster, cluster.make_topic(PARTITIONS), publisher(cluster))


def test_spark_gets_each_record_that_is_left_once(compacted: Compacted, read: Callable[..., DataFrame]) -> None:
    for options in ({}, {"minPartitions": "8"}):
        frame = read(compacted.topic, includeIndex="true", **options)
        assert frame.count() == len(PLACES)
        rows = sorted((row.partition, row.offset, row["_index"], bytes(row.value)) for row in frame.collect())
        assert rows == [(partition, offset, offset, value(offset)) for partition, offset in PLACES]
    inside = json.dumps({compacted.topic: {"0": GAP, "1": GAP}})
    assert offsets(read(compacted.topic, startingOffsets=inside)) == [place for place in PLACES if place[1] >= GAP]
    assert offsets(read(compacted.topic, endingOffsets=inside)) == [place for place in PLACES if place[1] < GAP]


def test_a_stream_goes_over_the_gaps_in_limited_batches(
    spark: SparkSession, servers: str, compacted: Compacted, tmp_path: Path
) -> None:
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "300"}
    job = Job(spark, tmp_path, servers=servers, subscribe=compacted.topic, **options)
    sizes = job.run()
    assert len(sizes) > 1, "the limit counts offsets, and cuts inside the gaps"
    assert sum(sizes) == len(PLACES)
    assert job.rows() == PLACES
    assert job.run() == []


def test_an_append_time_in_a_gap_leads_to_the_next_record(compacted: Compacted) -> None:
    found = compacted.first(pb.EXACT_TS_NS, compacted.gap_ts_ns)
    assert (found.offset, found.value) == (2 * LONELY, value(2 * LONELY))
    assert found.ts_ns > compacted.gap_ts_ns


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_has_the_records_that_are_left(compacted: Compacted, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    smq = Path(sys.executable).with_name("smq")
    command = ["topic", "export", compacted.topic, "--output", str(path), "--bootstrap", compacted.cluster.servers]
    subprocess.run([smq, *command], check=True, timeout=120, capture_output=True)
    if suffix == "parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["partition"], row["_index"]) for row in rows] == PLACES
