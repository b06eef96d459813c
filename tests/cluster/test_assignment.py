"""How offsets are given out, through gRPC on three real nodes (the Assignment lines of the behaviour checklist)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import RING_SLOTS_PER_PARTITION, key_partition, ring_range
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from tests.cluster.raw import raises

NewTopic = Callable[..., str]
LeaderOf = Callable[..., RawNode]


def test_ten_single_records_get_offsets_0_to_9_and_hwm_10(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    answers = [leader.publish_values(topic, 0, [b"%d" % i]) for i in range(10)]
    assert [answer.base_offset for answer in answers] == list(range(10))
    assert all(answer.base_offset == answer.last_offset for answer in answers)
    assert leader.range_info(topic, 0).hwm == 10


def test_batches_of_5_and_3_get_0_to_4_and_5_to_7(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    first = leader.publish_values(topic, 0, [b"a"] * 5)
    second = leader.publish_values(topic, 0, [b"b"] * 3)
    assert (first.base_offset, first.last_offset) == (0, 4)
    assert (second.base_offset, second.last_offset) == (5, 7)
    assert leader.range_info(topic, 0).hwm == 8
    assert first.ts_ns < second.ts_ns


def test_empty_partition_has_hwm_0_on_every_node(cluster: Cluster, new_topic: NewTopic) -> None:
    topic = new_topic()
    for node in cluster.alive():
        info = node.raw.range_info(topic, 0)
        assert (info.log_start, info.lso, info.hwm, info.next_offset) == (0, 0, 0, 0)


def test_partitions_number_their_records_independently(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic(2)
    for partition, count in ((0, 4), (1, 7), (0, 2)):
        leader_of(topic, partition).publish_values(topic, partition, [b"x"] * count)
    assert leader_of(topic, 0).range_info(topic, 0).hwm == 6
    assert leader_of(topic, 1).range_info(topic, 1).hwm == 7


def test_ten_concurrent_publishers_of_100_get_exactly_0_to_999(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    leader = leader_of(topic)

    def publish(publisher: int) -> list[int]:
        answers = leader.publish(
            [
                pb.PublishRecordRequest(
                    partition=0,
                    session_id=session(publisher),
                    correlation_id=number,
                    records=pb.NewRecords(records=[pb.NewRecord(value=b"%d-%d" % (publisher, number))]),
                    base_sequence=number,
                )
                for number in range(100)
            ]
        )
        assert [answer.error.name for answer in answers if answer.HasField("error")] == []
        return [answer.base_offset for answer in answers]

    def session(publisher: int) -> str:
        return f"{topic}-{publisher}"

    for publisher in range(10):
        leader.start_session(topic, session(publisher))
    with ThreadPoolExecutor(10) as pool:
        given = list(pool.map(publish, range(10)))
    assert sorted(offset for offsets in given for offset in offsets) == list(range(1000))
    assert all(offsets == sorted(offsets) for offsets in given)
    stored = leader.read_all(topic, 0)
    for publisher, offsets in enumerate(given):
        assert [stored[offset] for offset in offsets] == [b"%d-%d" % (publisher, number) for number in range(100)]


@pytest.mark.parametrize("payload", [{"records": pb.NewRecords()}, {"batch": b""}, {}])
def test_batch_without_records_is_an_error_and_takes_no_offset(
    new_topic: NewTopic, leader_of: LeaderOf, payload: dict[str, Any]
) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    session = f"{topic}-empty"
    leader.start_session(topic, session)
    (answer,) = leader.publish([pb.PublishRecordRequest(partition=0, session_id=session, correlation_id=1, **payload)])
    assert answer.error.name in ("INVALID_BATCH", "INVALID_REQUEST", "CORRUPT_BATCH")
    assert answer.base_offset == -1
    assert leader.range_info(topic, 0).next_offset == 0


def test_offset_exists_only_after_a_publish(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, lambda: leader.list_offset(topic, 0, pb.EXACT_OFFSET, offset_value=0))
    assert (error.details.lo, error.details.hi) == (0, 0)
    leader.publish_values(topic, 0, [b"now"])
    assert leader.list_offset(topic, 0, pb.EXACT_OFFSET, offset_value=0).offset == 0


def test_partition_owns_its_ring_range_on_every_node(cluster: Cluster, new_topic: NewTopic) -> None:
    topic = new_topic(3)
    for node in cluster.alive():
        for partition in range(3):
            info = node.raw.range_info(topic, partition)
            width = RING_SLOTS_PER_PARTITION
            assert (info.range_start, info.range_stop) == (width * partition, width * partition + width)
    for key in (b"", b"AA", b"UA", b"a longer key"):
        info = cluster.nodes[1].raw.range_info(topic, key_partition(key, 3))
        assert (info.range_start, info.range_stop) == ring_range(key_partition(key, 3))


def test_topic_that_starts_past_2_to_the_40_numbers_on_from_there(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    start = 2**40
    topic = new_topic(start_offset=start)
    leader = leader_of(topic)
    assert leader.publish_values(topic, 0, [b"a", b"b"]).base_offset == start
    info = leader.range_info(topic, 0)
    assert (info.log_start, info.hwm) == (start, start + 2)
    assert leader.read_all(topic, 0, start) == {start: b"a", start + 1: b"b"}


def test_idempotent_retry_is_stored_once_and_answered_with_the_first_offset(
    new_topic: NewTopic, leader_of: LeaderOf
) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    session = f"{topic}-idem"
    leader.start_session(topic, session)
    request = pb.PublishRecordRequest(
        partition=0,
        base_sequence=0,
        session_id=session,
        correlation_id=1,
        records=pb.NewRecords(records=[pb.NewRecord(value=b"once")]),
    )
    (first,) = leader.publish([request])
    (again,) = leader.publish([request])
    assert (first.duplicate, again.duplicate) == (False, True)
    assert (again.base_offset, again.last_offset) == (first.base_offset, first.last_offset) == (0, 0)
    assert leader.read_all(topic, 0) == {0: b"once"}


def test_sequence_gap_is_refused_and_stores_nothing(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    leader = leader_of(topic)
    session = f"{topic}-gap"
    leader.start_session(topic, session)

    def request(sequence: int) -> pb.PublishRecordRequest:
        records = pb.NewRecords(records=[pb.NewRecord(value=b"x")])
        return pb.PublishRecordRequest(
            partition=0, session_id=session, correlation_id=1, records=records, base_sequence=sequence
        )

    (first,) = leader.publish([request(0)])
    assert not first.HasField("error")
    (gap,) = leader.publish([request(2)])
    assert gap.error.name == "OUT_OF_ORDER_SEQUENCE"
    assert leader.range_info(topic, 0).next_offset == 1
