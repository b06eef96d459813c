"""Reading a range through faults: other replicas, damaged bytes, lagging nodes, logs without their first records."""

import logging
from collections.abc import Iterator

import pytest
from pyspark.sql.datasource import InputPartition

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.records import HEADER_BYTES, NewRecord
from smq.spark_connector.batch_reader import SmqReader
from smq.spark_connector.errors import DataLossError, OptionError, ReadError
from smq.spark_connector.options import read_options
from smq.spark_connector.planning import SmqSlice
from smq.spark_connector.schema import default_schema
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread
from tests.unit.spark_connector.support import records

SCHEMA = default_schema(include_headers=False, include_index=True)
TOPIC = "t"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """1000 records in 20 batches of one partition, fetched about three batches at a time."""
    with cluster_in_thread(3, t=1) as cluster:
        cluster.fetch_bytes_max = 8000
        for first in range(0, 1000, 50):
            cluster.append(TOPIC, 0, records(50, first=first))
        yield cluster


def reader_of(cluster: FakeCluster, **options: str) -> SmqReader:
    given = {"servers": cluster.servers, "subscribe": TOPIC, "retrytimeoutms": "2000", **options}
    return SmqReader(read_options(given), SCHEMA)


def offsets_of(reader: SmqReader, slices: list[InputPartition] | None = None) -> list[int]:
    found: list[int] = []
    for part in reader.partitions() if slices is None else slices:
        for batch in reader.read(part):
            found += batch.column("offset").to_pylist()
    return found


def preferred(slices: list[InputPartition], cluster: FakeCluster) -> int:
    """Number of the node that the first slice reads from first."""
    (part,) = slices
    assert isinstance(part, SmqSlice)
    numbers = {node.address: number for number, node in cluster.nodes.items()}
    return numbers[part.ranges[0].replicas[0]]


def test_complete_topic_arrives_in_order_and_once(cluster: FakeCluster) -> None:
    assert offsets_of(reader_of(cluster)) == list(range(1000))


def test_batches_of_aborted_transactions_are_passed_over(cluster: FakeCluster) -> None:
    """The node sends them without data. They are no gap of the log, at its beginning, inside and at its end."""
    cluster.hidden = {0, 100, 150, 500, 950}
    left_out = {offset for base in cluster.hidden for offset in range(base, base + 50)}
    assert offsets_of(reader_of(cluster)) == [offset for offset in range(1000) if offset not in left_out]


def test_range_inside_batches_is_cut_exactly(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, startingoffsets='{"t":{"0":73}}', endingoffsets='{"t":{"0":811}}')
    assert offsets_of(reader) == list(range(73, 811))


def test_read_stops_below_the_high_water_mark(cluster: FakeCluster) -> None:
    cluster.topics[TOPIC][0].hwm = 500
    assert offsets_of(reader_of(cluster)) == list(range(500))


def test_offsets_are_fixed_when_the_read_is_planned(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()
    cluster.append(TOPIC, 0, records(50, first=1000))
    assert offsets_of(reader, slices) == list(range(1000))


def test_slices_prefer_different_replicas(cluster: FakeCluster) -> None:
    slices = reader_of(cluster, minpartitions="3").partitions()
    first = {part.ranges[0].replicas[0] for part in slices if isinstance(part, SmqSlice)}
    assert first == {node.address for node in cluster.nodes.values()}


def test_fenced_node_is_not_chosen_while_others_live(cluster: FakeCluster) -> None:
    cluster.fenced.add(1)
    (part,) = reader_of(cluster).partitions()
    assert isinstance(part, SmqSlice)
    assert sorted(part.ranges[0].replicas) == sorted(cluster.nodes[number].address for number in (2, 3))
    cluster.fenced.update((2, 3))
    assert offsets_of(reader_of(cluster)) == list(range(1000))


def test_replica_that_dies_in_the_middle_is_abandoned_for_another(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()
    node = cluster.nodes[preferred(slices, cluster)]

    async def die_after_three(part: pb.FetchedPartition) -> None:
        if len(node.fetches) == 3:
            await node.stop()  # the third answer never leaves, and no fourth is given

    node.on_fetch = die_after_three
    assert offsets_of(reader, slices) == list(range(1000))
    assert sum(len(other.fetches) for other in cluster.nodes.values() if other is not node) > 0


@pytest.mark.parametrize(
    "code", [ErrorCode.NOT_REPLICA, ErrorCode.NODE_NOT_READY, ErrorCode.SHUTTING_DOWN, ErrorCode.DATA_DAMAGED]
)
def test_refusal_of_one_replica_is_harmless(cluster: FakeCluster, code: ErrorCode) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()

    def refuse(part: pb.FetchedPartition) -> None:
        raise SmqError(code, "not here")

    cluster.nodes[preferred(slices, cluster)].on_fetch = refuse
    assert offsets_of(reader, slices) == list(range(1000))


def test_replica_that_failed_one_slice_is_asked_last_by_the_next(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, minpartitions="6")
    slices = reader.partitions()
    bad = cluster.nodes[1]

    def refuse(part: pb.FetchedPartition) -> None:
        raise SmqError(ErrorCode.NODE_NOT_READY, "starting")

    bad.on_fetch = refuse
    assert offsets_of(reader, slices) == list(range(1000))
    assert len(bad.fetches) == 1


def test_damaged_bytes_are_read_again_from_another_replica(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()

    def flip(part: pb.FetchedPartition) -> None:
        for batch in part.batches:
            damaged = bytearray(batch.data)
            damaged[HEADER_BYTES + 5] ^= 0xFF
            batch.data = bytes(damaged)

    cluster.nodes[preferred(slices, cluster)].on_fetch = flip
    (part,) = slices
    rows = [row for batch in reader.read(part) for row in batch.select(["key", "value"]).to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [(r.key, r.value) for r in records(1000)]


def test_lagging_replica_is_abandoned_for_one_with_the_records(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()

    def lag(part: pb.FetchedPartition) -> None:
        kept = [b for b in part.batches if b.last_offset < 500]
        del part.batches[:]
        part.batches.extend(kept)

    cluster.nodes[preferred(slices, cluster)].on_fetch = lag
    assert offsets_of(reader, slices) == list(range(1000))


def test_replica_that_does_not_know_a_new_topic_is_not_trusted(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()

    def unknown(part: pb.FetchedPartition) -> None:
        raise SmqError(ErrorCode.UNKNOWN_TOPIC, "no such topic")

    cluster.nodes[preferred(slices, cluster)].on_fetch = unknown
    assert offsets_of(reader, slices) == list(range(1000))


def test_all_replicas_failing_ends_in_an_error_that_names_each(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, retrytimeoutms="300")
    slices = reader.partitions()

    def refuse(part: pb.FetchedPartition) -> None:
        raise SmqError(ErrorCode.NODE_NOT_READY, "starting")

    for node in cluster.nodes.values():
        node.on_fetch = refuse
    with pytest.raises(ReadError, match="could not be read from offset 0 on") as e:
        offsets_of(reader, slices)
    assert all(node.address in str(e.value) for node in cluster.nodes.values())


def test_gap_in_the_log_is_an_error(cluster: FakeCluster) -> None:
    del cluster.topics[TOPIC][0].stored[10]
    with pytest.raises(DataLossError, match=r"offsets \[500, 550\) of t-0 are gone.*failOnDataLoss"):
        offsets_of(reader_of(cluster))


def test_gap_is_skipped_with_a_warning_if_data_loss_is_accepted(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    del cluster.topics[TOPIC][0].stored[10]
    with caplog.at_level(logging.WARNING):
        found = offsets_of(reader_of(cluster, failondataloss="false"))
    assert found == [*range(500), *range(550, 1000)]
    assert "[500, 550)" in caplog.text


def drop_head(cluster: FakeCluster, log_start: int) -> None:
    log = cluster.topics[TOPIC][0]
    log.log_start = log_start
    log.stored = [batch for batch in log.stored if batch.end > log_start]


def test_log_start_that_passes_a_planned_read_is_an_error(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()
    drop_head(cluster, 200)
    with pytest.raises(DataLossError, match=r"\[0, 200\) of t-0 are gone: the log now starts at 200"):
        offsets_of(reader, slices)


def test_log_start_that_passes_a_planned_read_is_skipped_if_accepted(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, failondataloss="false")
    slices = reader.partitions()
    drop_head(cluster, 200)
    assert offsets_of(reader, slices) == list(range(200, 1000))


def test_log_start_past_the_whole_planned_range_ends_it(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, failondataloss="false", endingoffsets='{"t":{"0":100}}')
    slices = reader.partitions()
    drop_head(cluster, 200)
    assert offsets_of(reader, slices) == []


@pytest.mark.parametrize("fail", ["true", "false"])
def test_topic_deleted_after_planning_is_data_loss(cluster: FakeCluster, fail: str) -> None:
    reader = reader_of(cluster, failondataloss=fail)
    slices = reader.partitions()
    cluster.delete(TOPIC)
    if fail == "false":
        assert offsets_of(reader, slices) == []
        return
    with pytest.raises(DataLossError, match="is gone"):
        offsets_of(reader, slices)


RECREATED = r"of t-0 are gone: the topic was deleted and created again"


def recreate(cluster: FakeCluster) -> None:
    """Another topic of the same name, with records at all offsets of the first one."""
    cluster.delete(TOPIC)
    cluster.create(TOPIC, 1)
    for first in range(0, 1000, 50):
        cluster.append(TOPIC, 0, records(50, first=first))


@pytest.mark.parametrize("fail", ["true", "false"])
def test_topic_created_again_after_planning_is_data_loss(cluster: FakeCluster, fail: str) -> None:
    reader = reader_of(cluster, failondataloss=fail)
    slices = reader.partitions()
    recreate(cluster)
    if fail == "false":
        assert offsets_of(reader, slices) == []
        return
    with pytest.raises(DataLossError, match=rf"\[0, 1000\) {RECREATED}"):
        offsets_of(reader, slices)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_topic_created_again_within_a_range_gives_none_of_its_records(cluster: FakeCluster, fail: str) -> None:
    reader = reader_of(cluster, failondataloss=fail)
    slices = reader.partitions()
    node = cluster.nodes[preferred(slices, cluster)]

    def recreate_after_two(part: pb.FetchedPartition) -> None:
        if len(node.fetches) == 2:
            recreate(cluster)  # this answer has records of the first topic

    node.on_fetch = recreate_after_two
    if fail == "false":
        assert offsets_of(reader, slices) == list(range(500))
        return
    with pytest.raises(DataLossError, match=rf"\[500, 1000\) {RECREATED}"):
        offsets_of(reader, slices)


def test_batch_that_does_not_decode_names_its_offset(cluster: FakeCluster) -> None:
    data = bytearray(cluster.topics[TOPIC][0].stored[0].data)
    # A header count that the records do not bear out, under a right CRC: only a producer can have done that.
    import struct

    from crc32c import crc32c

    struct.pack_into(">i", data, 57, 49)
    struct.pack_into(">i", data, 23, 48)
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    cluster.topics[TOPIC][0].append(bytes(data))
    cluster.topics[TOPIC][0].commit()
    with pytest.raises(ReadError, match="offset 1000 does not decode"):
        offsets_of(reader_of(cluster))


def test_unknown_topic_error_names_the_existing_ones(cluster: FakeCluster) -> None:
    with pytest.raises(OptionError, match=r"no topic 'nope' .*existing topics: t.*smq topic create"):
        reader_of(cluster, subscribe="nope").partitions()


def test_missing_assigned_partition_is_refused(cluster: FakeCluster) -> None:
    given = {"servers": cluster.servers, "assign": '{"t":[0,4]}'}
    with pytest.raises(OptionError, match=r"names \[4\]"):
        SmqReader(read_options(given), SCHEMA).partitions()


def test_empty_topic_gives_one_empty_slice(cluster: FakeCluster) -> None:
    cluster.create("empty", 3)
    reader = reader_of(cluster, subscribe="empty")
    slices = reader.partitions()
    assert len(slices) == 1
    assert offsets_of(reader, slices) == []
    assert offsets_of(reader, [InputPartition(None)]) == []


def test_cluster_that_does_not_answer_is_an_error_within_the_timeout() -> None:
    given = {"servers": "127.0.0.1:9", "subscribe": "t", "retrytimeoutms": "200"}
    with pytest.raises(ReadError, match=r"within 0\.2 s \(127\.0\.0\.1:9: .*no node answers") as caught:
        SmqReader(read_options(given), SCHEMA).partitions()
    assert "outcome" not in str(caught.value), "nothing was sent"


def test_one_living_bootstrap_server_is_enough(cluster: FakeCluster) -> None:
    reader = reader_of(cluster, servers=f"127.0.0.1:9,{cluster.nodes[3].address}")
    assert offsets_of(reader) == list(range(1000))


def test_out_of_range_answer_of_a_lagging_replica_is_not_data_loss(cluster: FakeCluster) -> None:
    reader = reader_of(cluster)
    slices = reader.partitions()

    def past_my_end(part: pb.FetchedPartition) -> None:
        from smq.raft_state.errors import ErrorDetails

        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, "past", ErrorDetails(lo=Offset(0), hi=Offset(0)))

    cluster.nodes[preferred(slices, cluster)].on_fetch = past_my_end
    assert offsets_of(reader, slices) == list(range(1000))


def test_small_partitions_share_a_task() -> None:
    with cluster_in_thread(1, many=20) as cluster:
        for p in range(20):
            cluster.append("many", p, [NewRecord(key=None, value=b"v", timestamp_ms=1)])
        reader = reader_of(cluster, subscribe="many")
        assert len(reader.partitions()) == 1
        assert offsets_of(reader) == [0] * 20
