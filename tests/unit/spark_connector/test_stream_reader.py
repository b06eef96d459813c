"""The stream reader without Spark: called as Spark calls it, over a faulty cluster in this process."""

import json
import time
from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset
from smq.spark_connector.batch_reader import SmqReader
from smq.spark_connector.errors import DataLossError, OptionError, ReadError
from smq.spark_connector.options import read_options, stream_options
from smq.spark_connector.planning import SmqSlice
from smq.spark_connector.stream import stream_reader as stream
from smq.spark_connector.stream.stream_reader import SmqStreamReader
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.log import FakePartition
from smq.testing.fake.runner import cluster_in_thread
from tests.unit.spark_connector.stream_query import SCHEMA, Query
from tests.unit.spark_connector.support import records


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Topic t: two partitions of 100 records each, in batches of 10."""
    with cluster_in_thread(3, t=2) as cluster:
        for partition in range(2):
            fill(cluster, partition, 100)
        yield cluster


def fill(cluster: FakeCluster, partition: int, count: int, topic: str = "t") -> None:
    for _ in range(count // 10):
        cluster.append(topic, partition, records(10))


def span(partition: int, lo: int, hi: int, topic: str = "t") -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for offset in range(lo, hi)]


def test_stream_from_earliest_reads_everything_and_then_new_records(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest")
    assert query.drain() == [200]
    fill(cluster, 1, 30)
    assert query.drain() == [30]
    assert sorted(query.rows) == span(0, 0, 100) + span(1, 0, 130)


def test_stream_starts_at_latest_by_default(cluster: FakeCluster) -> None:
    query = Query(cluster.servers)
    assert query.drain() == [0]  # Spark always runs a first micro-batch
    fill(cluster, 0, 20)
    assert query.drain() == [20]
    assert query.rows == span(0, 100, 120)


def test_stream_starts_by_time_and_by_json(cluster: FakeCluster) -> None:
    assert Query(cluster.servers, startingTimestamp="1700000000005").batch() == 2 * 95
    mixed = Query(cluster.servers, startingOffsets='{"t":{"0":-1,"1":73}}')
    assert mixed.drain() == [27]
    assert mixed.rows == span(1, 73, 100)


def test_trap_replayed_first_batch_keeps_its_original_latest(cluster: FakeCluster) -> None:
    """Trap: Spark asks for initialOffset again when batch 0 is replayed, and by then "latest" has moved."""
    query = Query(cluster.servers)
    query.start()
    fill(cluster, 0, 40)
    assert query.plan()
    fill(cluster, 0, 60)
    query.restart()  # killed before the first micro-batch was committed
    assert query.run() == span(0, 100, 140)
    query.rows += query.run()
    query.commit()
    query.drain()
    assert query.rows == span(0, 100, 200)


def test_trap_initial_offset_is_asked_twice_and_answers_once(cluster: FakeCluster) -> None:
    query = Query(cluster.servers)
    first = query.reader.initialOffset()
    fill(cluster, 0, 10)
    assert query.reader.initialOffset() == first


def test_trap_empty_first_batch_replayed_reads_nothing(cluster: FakeCluster) -> None:
    """Trap: a first micro-batch without records is stored as the fresh start itself."""
    query = Query(cluster.servers)
    assert query.plan()
    fill(cluster, 0, 50)
    query.restart(startingOffsets="earliest")  # so that the start moves before it is asked for again
    assert query.run() == []
    query.commit()
    assert query.drain() == [50]
    assert query.rows == span(0, 100, 150)


def test_trap_nothing_new_returns_the_start_unchanged(cluster: FakeCluster) -> None:
    """Trap: Spark compares positions as text; another text of the same position causes endless batches."""
    query = Query(cluster.servers, startingOffsets="earliest")
    query.drain()
    end = json.loads(query.offset_log[-1])
    assert "from" in end
    assert query.reader.latestOffset(end, ReadAllAvailable()) == end
    restarted = Query(cluster.servers, startingOffsets="earliest")
    assert json.dumps(restarted.reader.latestOffset(end, ReadAllAvailable())) == query.offset_log[-1]


def test_trap_offsets_above_two_to_the_53_survive(cluster: FakeCluster) -> None:
    far = 2**53 + 1
    cluster.topics["t"][0] = FakePartition(log_start=far, hwm=far)
    fill(cluster, 0, 20)
    query = Query(cluster.servers, startingOffsets="earliest")
    query.drain()
    assert [row for row in query.rows if row[1] == 0] == span(0, far, far + 20)


def test_replay_reads_the_same_records_after_newer_ones(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="60")
    query.batch()
    query.plan()
    first = query.run()
    fill(cluster, 0, 100)
    query.restart(maxOffsetsPerTrigger="5")
    assert query.run() == first


# ------------------------------------------------------------------------------------------------ admission
def test_trap_commit_and_stop_may_come_late_or_never(cluster: FakeCluster) -> None:
    """Trap: commit comes with the next plan, and never for the last micro-batch; query.stop() does not call stop."""
    plain = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="90")
    limited = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="90")
    while plain.batch() >= 0:
        limited.batch()
        limited.reader.commit(json.loads(limited.offset_log[0]))
        limited.reader.stop()
    assert limited.offset_log == plain.offset_log
    assert limited.rows == plain.rows


def test_offsets_per_trigger_are_respected(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="64")
    assert query.drain() == [64, 64, 64, 8]
    assert sorted(query.rows) == span(0, 0, 100) + span(1, 0, 100)


def test_bytes_per_trigger_are_respected(cluster: FakeCluster) -> None:
    size = len(cluster.topics["t"][0].stored[0].data)
    query = Query(cluster.servers, startingOffsets="earliest", maxBytesPerTrigger=str(6 * size))
    sizes = query.drain()
    assert len(sizes) >= 4
    assert max(sizes) <= 60
    assert sorted(query.rows) == span(0, 0, 100) + span(1, 0, 100)


def test_all_available_overrides_the_options(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    end = query.reader.latestOffset(query.start(), ReadAllAvailable())
    assert end["o"] == {"t": {"0": 100, "1": 100}}
    assert sum(query.reader.latestOffset(query.start(), ReadMaxRows(30))["o"]["t"].values()) == 30


def test_min_offsets_wait_for_rows_or_for_the_delay(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    query = Query(cluster.servers, startingOffsets="earliest", minOffsetsPerTrigger="50", maxTriggerDelay="10s")
    assert query.batch() == 200  # the first is never postponed
    fill(cluster, 0, 40)
    assert query.batch() == -1
    fill(cluster, 0, 10)
    assert query.batch() == 50
    fill(cluster, 0, 10)
    now += 9.9
    assert query.batch() == -1
    now += 0.2
    assert query.batch() == 10
    now += 100
    assert query.batch() == -1


def test_sizes_come_from_another_replica_if_one_does_not_know_them(cluster: FakeCluster) -> None:
    def not_a_replica(listed: pb.ListedOffset) -> None:
        raise SmqError(ErrorCode.NOT_REPLICA, "elsewhere")

    for node in list(cluster.nodes.values())[:2]:
        node.on_list = not_a_replica
    assert Query(cluster.servers, startingOffsets="earliest", maxBytesPerTrigger="1").batch() == 10


def test_retention_between_two_calls_is_looked_up_again(cluster: FakeCluster) -> None:
    def loses_head(listed: pb.ListedOffset) -> None:
        log = cluster.topics["t"][0]
        if log.log_start < 70:
            log.log_start = 70
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, "gone", ErrorDetails(lo=Offset(70), hi=Offset(100)))

    for node in cluster.nodes.values():
        node.on_list = loses_head
    query = Query(
        cluster.servers, startingOffsets='{"t":{"0":-2,"1":100}}', maxBytesPerTrigger="1000", failOnDataLoss="false"
    )
    query.drain()
    assert query.rows == span(0, 70, 100)


# ------------------------------------------------------------------------------------------------ AvailableNow
def test_available_now_ends_at_the_end_as_of_its_start(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="70")
    query.reader.prepareForTriggerAvailableNow()
    fill(cluster, 0, 500)
    cluster.grow("t", 3)
    fill(cluster, 2, 10)
    assert query.drain() == [70, 70, 60]
    assert sorted(query.rows) == span(0, 0, 100) + span(1, 0, 100)
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert sum(query.drain()) == 510


def test_available_now_ignores_the_minimum(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", minOffsetsPerTrigger="1000")
    for expected in ([200], [10]):
        query.restart()
        query.reader.prepareForTriggerAvailableNow()
        assert query.drain() == expected
        fill(cluster, 0, 10)


def test_available_now_fails_instead_of_ending_if_the_cluster_is_unavailable(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="70", retryTimeoutMs="300")
    query.reader.prepareForTriggerAvailableNow()
    query.batch()
    cluster.call(cluster.stop())
    with pytest.raises(ReadError, match="could not be asked"):
        query.plan()


# ------------------------------------------------------------------------------------------------ the cluster changes
def test_trap_unavailable_cluster_does_not_end_the_query(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap: any exception in latestOffset kills the query."""
    monkeypatch.setattr(stream, "LOOK_UP_TIMEOUT_S", 0.2)
    query = Query(cluster.servers, startingOffsets="earliest")
    query.drain()
    cluster.call(cluster.stop())
    assert query.batch() == -1
    assert "the query waits" in caplog.text


def test_a_partition_whose_end_is_not_known_holds_up_no_other_and_lost_nothing(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest")
    assert query.drain() == [200]
    lagging = cluster.topics["t"][0]
    lagging.told_hwm = 50  # the leader is gone, and the other nodes know less than the query has read
    fill(cluster, 0, 20)
    fill(cluster, 1, 30)
    assert query.drain() == [30]
    lagging.told_hwm = 110
    assert query.drain() == [10]
    lagging.told_hwm = None
    assert query.drain() == [10]
    assert sorted(query.rows) == span(0, 0, 120) + span(1, 0, 130)


def test_a_planned_batch_is_read_although_the_end_is_not_known_any_more(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest")
    assert query.plan()
    cluster.topics["t"][0].told_hwm = 50
    assert sorted(query.run()) == span(0, 0, 100) + span(1, 0, 100)


@pytest.mark.parametrize("partition", [0, 1])
def test_what_must_know_an_end_waits_for_it_and_says_whose_it_is(cluster: FakeCluster, partition: int) -> None:
    cluster.topics["t"][partition].told_hwm = 50
    waiting = rf"leaders of t-{partition} did not"
    with pytest.raises(ReadError, match=waiting):
        Query(cluster.servers, retryTimeoutMs="300").reader.initialOffset()
    with pytest.raises(ReadError, match=waiting):
        Query(cluster.servers, retryTimeoutMs="300").reader.prepareForTriggerAvailableNow()
    options = {"servers": cluster.servers, "subscribe": "t", "retrytimeoutms": "300"}
    with pytest.raises(ReadError, match=waiting):
        SmqReader(read_options(options), SCHEMA).partitions()
    other = {**options, "assign": f'{{"t":[{1 - partition}]}}'}
    del other["subscribe"]
    (part,) = SmqReader(read_options(other), SCHEMA).partitions()
    assert isinstance(part, SmqSlice)
    assert [r.hi for r in part.ranges] == [100], "another partition's leader is not waited for"


def test_partition_added_during_the_stream_is_read_from_its_beginning(cluster: FakeCluster) -> None:
    query = Query(cluster.servers)
    query.drain()
    cluster.grow("t", 3)
    fill(cluster, 2, 20)
    query.plan()
    fill(cluster, 2, 10)
    query.restart()
    assert query.run() == span(2, 0, 20)
    query.rows += query.run()
    query.commit()
    query.drain()
    assert query.rows == span(2, 0, 30)


def test_empty_added_partition_costs_one_batch(cluster: FakeCluster) -> None:
    query = Query(cluster.servers)
    query.drain()
    cluster.grow("t", 3)
    assert query.drain() == [0]


def test_pattern_includes_topics_created_later(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, subscribePattern="t|new-.*")
    query.drain()
    for topic in ("new-1", "other"):
        cluster.create(topic, 1)
        fill(cluster, 0, 10, topic)
    query.drain()
    assert query.rows == span(0, 0, 10, "new-1")


def test_pattern_that_matches_nothing_yet_waits(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, subscribePattern="new-.*")
    assert query.drain() == [0]
    cluster.create("new-1", 1)
    fill(cluster, 0, 10, "new-1")
    assert query.drain() == [10]


def test_assign_keeps_its_partitions(cluster: FakeCluster) -> None:
    query = Query(cluster.servers)
    query.options.pop("subscribe")
    query.restart(assign='{"t":[1]}', startingOffsets="earliest")
    cluster.grow("t", 3)
    fill(cluster, 2, 10)
    query.drain()
    assert query.rows == span(1, 0, 100)


def test_restart_with_other_topics_drops_old_and_starts_new_ones(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest")
    query.drain()
    cluster.create("u", 1)
    fill(cluster, 0, 10)
    fill(cluster, 0, 20, "u")
    query.rows.clear()
    query.restart(subscribe="u")
    query.drain()
    assert query.rows == span(0, 0, 20, "u")


def test_missing_topic_is_refused_before_anything_runs(cluster: FakeCluster) -> None:
    with pytest.raises(OptionError, match="no topic 'u'"):
        Query(cluster.servers, subscribe="t,u").start()


def wrong_storage() -> "pytest.RaisesExc[SmqError]":
    return pytest.raises(SmqError, check=lambda error: error.code is ErrorCode.WRONG_STORAGE)


@pytest.mark.parametrize("named", [{"subscribe": "t,images"}, {"assign": '{"images":[0]}'}])
def test_a_topic_of_external_storage_is_refused_on_the_driver(cluster: FakeCluster, named: dict[str, str]) -> None:
    cluster.create("images", 2, is_external=True)
    given = {"servers": cluster.servers, **named}
    with pytest.raises(SmqError, match=r"WRONG_STORAGE: .*'images'.*storage=external"):
        SmqReader(read_options(given), SCHEMA).partitions()
    with wrong_storage():
        SmqStreamReader(stream_options(given), SCHEMA).initialOffset()


def test_a_pattern_passes_over_topics_of_external_storage(cluster: FakeCluster) -> None:
    cluster.create("images", 2, is_external=True)
    cluster.topics["images"][0].hwm = 5
    query = Query(cluster.servers, subscribePattern=".*", startingOffsets="earliest")
    assert query.drain() == [200]
    given = {"servers": cluster.servers, "subscribepattern": ".*"}
    (only,) = SmqReader(read_options(given), SCHEMA).partitions()
    assert isinstance(only, SmqSlice)
    assert {r.topic for r in only.ranges} == {"t"}


def test_a_restarted_query_whose_topic_came_back_with_external_storage_is_refused(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss="false")
    query.drain()
    cluster.delete("t")
    cluster.create("t", 2, is_external=True)
    query.restart()
    with wrong_storage():
        query.batch()


# ------------------------------------------------------------------------------------------------ data loss
def lose_head(cluster: FakeCluster, upto: int) -> None:
    cluster.topics["t"][0].log_start = upto


def test_retention_that_passes_a_slow_query_is_data_loss(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="20")
    query.batch()
    lose_head(cluster, 70)
    with pytest.raises(DataLossError, match=r"offsets \[10, 70\) of t-0 are gone.*failOnDataLoss"):
        query.plan()


def test_retention_that_passes_a_slow_query_is_skipped_if_accepted(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="20", failOnDataLoss="false")
    query.batch()
    lose_head(cluster, 70)
    query.drain()
    assert sorted(query.rows) == span(0, 0, 10) + span(0, 70, 100) + span(1, 0, 100)
    assert "offsets [10, 70) of t-0 are gone" in caplog.text


@pytest.mark.parametrize("fail", ["true", "false"])
def test_retention_that_passes_a_planned_batch(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.plan()
    lose_head(cluster, 70)
    if fail == "true":
        with pytest.raises(DataLossError, match=r"offsets \[0, 70\) of t-0"):
            query.run()
    else:
        assert sorted(query.run()) == span(0, 70, 100) + span(1, 0, 100)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_log_that_ends_before_a_planned_batch_does(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.plan()
    cluster.topics["t"][0].truncate(60)
    if fail == "true":
        with pytest.raises(DataLossError, match="t-0 ends at 60, before offset 100 that a micro-batch"):
            query.run()
    else:
        assert sorted(query.run()) == span(0, 0, 60) + span(1, 0, 100)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_recreated_topic_has_nothing_of_a_planned_batch(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.plan()
    cluster.delete("t")
    cluster.create("t", 2)
    fill(cluster, 0, 100)
    if fail == "true":
        with pytest.raises(DataLossError, match="topic 't' has been deleted and created again"):
            query.run()
    else:
        assert query.run() == []


@pytest.mark.parametrize("fail", ["true", "false"])
def test_recreated_topic_gives_nothing_to_the_tasks_of_the_old_one(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.plan()
    tasks = query.reader.partitions(query.start(), json.loads(query.offset_log[0]))
    cluster.delete("t")
    cluster.create("t", 2)
    for partition in range(2):
        fill(cluster, partition, 100)
    if fail == "true":
        with pytest.raises(DataLossError, match="the topic was deleted and created again"):
            list(query.reader.read(tasks[0]))
    else:
        assert [batch for task in tasks for batch in query.reader.read(task)] == []


@pytest.mark.parametrize("fail", ["true", "false"])
def test_recreated_topic_is_not_taken_for_the_old_one(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.drain()
    cluster.delete("t")
    cluster.create("t", 2)
    for partition in range(2):
        fill(cluster, partition, 120)
    if fail == "true":
        with pytest.raises(DataLossError, match="topic 't' has been deleted and created again"):
            query.plan()
    else:
        assert query.drain() == [240]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_deleted_topic(cluster: FakeCluster, fail: str) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.drain()
    cluster.delete("t")
    if fail == "true":
        with pytest.raises(DataLossError, match="t-0 is gone: the topic has been deleted"):
            query.plan()
    else:
        assert query.drain() == [0]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_log_shorter_than_the_query_has_read(cluster: FakeCluster, fail: str) -> None:
    """A cluster that was restored from an older backup."""
    query = Query(cluster.servers, startingOffsets="earliest", failOnDataLoss=fail)
    query.drain()
    cluster.topics["t"][0].truncate(60)
    if fail == "true":
        with pytest.raises(DataLossError, match="t-0 ends at 60, before offset 100"):
            query.plan()
    else:
        query.drain()
        fill(cluster, 0, 10)
        query.rows.clear()
        query.drain()
        assert query.rows == span(0, 60, 70)


def test_report_of_the_latest_offset_shows_the_lag(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", maxOffsetsPerTrigger="50")
    assert query.reader.reportLatestOffset() is None
    query.batch()
    latest = query.reader.reportLatestOffset()
    assert latest is not None
    assert latest["o"] == {"t": {"0": 100, "1": 100}}
    query.reader.commit(query.start())
    query.reader.stop()
    assert query.batch() == 50


def test_tasks_are_cut_according_to_the_options(cluster: FakeCluster) -> None:
    query = Query(cluster.servers, startingOffsets="earliest", minPartitions="8")
    query.plan()
    slices = query.reader.partitions(query.start(), json.loads(query.offset_log[0]))
    assert len(slices) >= 8
    assert all(isinstance(part, SmqSlice) and len(part.ranges) == 1 for part in slices)
