"""The Broker and Admin services over gRPC, against a real node: reads, offsets, groups, topics, views."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.limits import FETCH_PARTITIONS_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import decode_batch, parse_header
from smq.testing.served import PATIENCE_S, Served, fails, publish_request, served_node


def part(offset: int = 0, **fields: Any) -> pb.FetchPartition:
    return pb.FetchPartition(**{"partition": 0, "topic": "t", "offset": offset, **fields})


async def fetch(served: Served, *partitions: pb.FetchPartition, **fields: Any) -> list[pb.FetchedPartition]:
    async with asyncio.timeout(PATIENCE_S):
        response = await served.broker.Fetch(pb.FetchRequest(partitions=partitions, **fields))
    return list(response.partitions)


async def read_through(served: Served, until: int, **fields: Any) -> list[int]:
    """The offsets of all records from 0 to `until`, fetch by fetch."""
    got: list[int] = []
    while len(got) < until:
        (partition,) = await fetch(served, part(len(got)), max_wait_ms=1000, **fields)
        assert not partition.HasField("error"), partition.error
        got += [r.offset for b in partition.batches for r in decode_batch(b.data) if r.offset >= len(got)]
    return got


# -------------------------------------------------------------------------------------------------------- fetch
async def test_fetch_returns_the_batches_as_they_lie_in_the_log(served: Served) -> None:
    await served.create()
    sent = [publish_request([b"x"] * 5, correlation_id=1), publish_request([b"y"] * 3, correlation_id=2)]
    answers = await served.publish(*sent)
    assert await read_through(served, 8) == list(range(8))
    (partition,) = await fetch(served, part(2))
    assert [(b.base_offset, b.last_offset, b.ts_ns) for b in partition.batches] == [
        (a.base_offset, a.last_offset, a.ts_ns) for a in answers
    ]
    assert [parse_header(b.data).base_offset for b in partition.batches] == [0, 5]
    assert [b.data[16:] for b in partition.batches] == [r.batch[16:] for r in sent]
    assert (partition.log_start, partition.hwm, partition.lso) == (0, 8, 8)


async def test_fetch_by_the_id_of_a_topic_reads_no_later_one_of_its_name(served: Served) -> None:
    async def create() -> bytes:
        created = await served.admin.CreateTopic(pb.CreateTopicRequest(name="t", partition_count=1))
        await served.fill([5])
        found: bytes = created.topic_id
        return found

    old = await create()
    (partition,) = await fetch(served, part(topic_id=old))
    assert len(partition.batches) == 1
    await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
    new = await create()
    wanted = [part(topic_id=old), part(topic_id=new), part(), part(topic_id=new, partition=3)]
    gone, found, named, beyond = await fetch(served, *wanted)
    assert (gone.error.name, list(gone.batches)) == ("UNKNOWN_TOPIC", [])
    assert old.hex() in gone.error.message
    assert [len(p.batches) for p in (found, named)] == [1, 1]
    assert beyond.error.name == "UNKNOWN_PARTITION"
    refused = await fails(served.broker.Fetch(pb.FetchRequest(partitions=[part(topic_id=b"abc")])))
    assert (refused.name, refused.message) == ("INVALID_REQUEST", "topic_id has 3 bytes, not 16")


async def test_fetch_at_the_high_water_mark_is_empty_and_past_the_end_is_out_of_range(served: Served) -> None:
    await served.create()
    await served.fill([5])
    (at_end,) = await fetch(served, part(5), max_wait_ms=1)
    assert (list(at_end.batches), at_end.hwm, at_end.HasField("error")) == ([], 5, False)
    for offset in (-1, 6, 2**40):
        (beyond,) = await fetch(served, part(offset), max_wait_ms=1)
        assert (beyond.error.name, beyond.error.lo, beyond.error.hi) == ("OFFSET_OUT_OF_RANGE", 0, 5)


async def test_a_long_poll_is_woken_by_the_next_append(served: Served) -> None:
    await served.create(partitions=3)
    wanted = [part(partition=p) for p in range(3)]
    poll = asyncio.create_task(fetch(served, *wanted, max_wait_ms=60_000))
    await fetch(served, part(), max_wait_ms=1)  # by now the poll waits
    await served.publish(publish_request([b"x"], partition=1))
    partitions = await poll
    assert [len(p.batches) for p in partitions] == [0, 1, 0]
    assert [p.hwm for p in partitions] == [0, 1, 0]


async def test_a_poll_that_nothing_comes_for_ends_empty(served: Served) -> None:
    await served.create()
    (partition,) = await fetch(served, part(), max_wait_ms=20)
    assert (list(partition.batches), partition.HasField("error")) == ([], False)


async def test_each_partition_has_its_own_error(served: Served) -> None:
    await served.create()
    await served.fill([2])
    wanted = [part(), part(topic="absent"), part(partition=5), part(9)]
    partitions = await fetch(served, *wanted, max_wait_ms=60_000)
    names = [p.error.name if p.HasField("error") else len(p.batches) for p in partitions]
    assert names == [1, "UNKNOWN_TOPIC", "UNKNOWN_PARTITION", "OFFSET_OUT_OF_RANGE"]


async def test_byte_caps_hold_and_the_first_batch_always_comes(served: Served) -> None:
    await served.create(partitions=2)
    for partition in (0, 1):
        requests = (publish_request([b"x" * 1000], partition=partition, correlation_id=i) for i in range(10))
        await served.publish(*requests)
    whole = await fetch(served, part(), part(partition=1))
    assert [len(p.batches) for p in whole] == [10, 10]
    capped = await fetch(served, part(), part(partition=1), max_bytes=5500)
    assert [len(p.batches) for p in capped] == [5, 0]
    assert [p.hwm for p in capped] == [10, 10]
    (first,) = await fetch(served, part(max_bytes=1))
    assert len(first.batches) == 1
    (tiny,) = await fetch(served, part(), max_bytes=1)
    assert len(tiny.batches) == 1


@pytest.mark.parametrize(
    "request_",
    [
        pb.FetchRequest(),
        pb.FetchRequest(partitions=[part()] * (FETCH_PARTITIONS_MAX + 1)),
        pb.FetchRequest(partitions=[part()], max_wait_ms=-1),
        pb.FetchRequest(partitions=[part()], max_bytes=-1),
        pb.FetchRequest(partitions=[part(max_bytes=-1)]),
    ],
)
async def test_a_fetch_that_makes_no_sense_is_refused(served: Served, request_: pb.FetchRequest) -> None:
    assert (await fails(served.broker.Fetch(request_))).name == "INVALID_REQUEST"


async def test_a_client_that_withdraws_its_poll_leaves_no_waiter(served: Served) -> None:
    await served.create()
    reads = served.server.node.replicas.reads
    calls = [served.broker.Fetch(pb.FetchRequest(partitions=[part()], max_wait_ms=60_000)) for _ in range(20)]
    await _until(lambda: reads._parked_count == 20)
    for call in calls:
        call.cancel()
    await _until(lambda: reads._parked_count == 0)
    await served.fill([3])
    assert await read_through(served, 3) == [0, 1, 2]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------ offsets
async def test_list_offsets_follows_the_table_of_positions(served: Served) -> None:
    await served.create()
    await served.fill([5, 5])
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=5))
    requested = [
        (pb.EXACT_OFFSET, 7, (7, False, "")),
        (pb.EXACT_OFFSET, 10, (-1, False, "OFFSET_OUT_OF_RANGE")),
        (pb.RESET_TO_OFFSET, 2, (5, True, "")),
        (pb.RESET_TO_OFFSET, 99, (10, True, "")),
        (pb.EXACT_TS_NS, 2**62, (10, False, "")),
        (pb.EXACT_TS_NS, 0, (5, False, "")),
        (pb.RESET_TO_EARLIEST, 0, (5, False, "")),
        (pb.RESET_TO_LATEST, 0, (10, False, "")),
        (pb.RESUME_OR_EARLIEST, 0, (5, False, "")),
        (pb.RESUME_OR_LATEST, 0, (10, False, "")),
        (pb.OFFSET_TYPE_UNSPECIFIED, 0, (-1, False, "INVALID_REQUEST")),
    ]
    request = pb.ListOffsetsRequest(
        partitions=[
            pb.ListOffsetsPartition(partition=0, topic="t", offset_type=t, offset_value=v, group="g")
            for t, v, _ in requested
        ]
    )
    listed = (await served.broker.ListOffsets(request)).offsets
    assert [(o.offset, o.clamped, o.error.name) for o in listed] == [expected for *_, expected in requested]
    assert {(o.lo, o.hi) for o in listed if not o.HasField("error")} == {(5, 10)}
    assert (listed[1].error.lo, listed[1].error.hi) == (5, 10)


async def test_list_offsets_by_create_time_is_exact_to_the_record(served: Served) -> None:
    await served.create()
    await served.fill([5])  # created at 1000 .. 1004
    for timestamp, expected in [(0, 0), (1000, 0), (1003, 3), (1004, 4), (1005, 5)]:
        requested = pb.ListOffsetsPartition(partition=0, topic="t", timestamp_ms=timestamp)
        listed = await served.broker.ListOffsets(pb.ListOffsetsRequest(partitions=[requested]))
        assert listed.offsets[0].offset == expected


async def test_list_offsets_by_size_ends_between_batches_and_after_one_at_least(served: Served) -> None:
    await served.create()
    await served.fill([2, 2, 2])
    listed = []
    for start, size in [(0, 1), (0, 1 << 20), (3, 1), (6, 1)]:
        requested = pb.ListOffsetsPartition(partition=0, topic="t", offset_value=start, max_bytes=size)
        listed.append((await served.broker.ListOffsets(pb.ListOffsetsRequest(partitions=[requested]))).offsets[0])
    assert [o.offset for o in listed] == [2, 6, 4, 6]
    assert {(o.lo, o.hi) for o in listed} == {(0, 6)}
    one, whole, _, none = [o.size_bytes for o in listed]
    assert (whole, none) == (3 * one, 0)
    requested = pb.ListOffsetsPartition(partition=0, topic="t", offset_value=0, max_bytes=2 * one)
    exact = (await served.broker.ListOffsets(pb.ListOffsetsRequest(partitions=[requested]))).offsets[0]
    assert (exact.offset, exact.size_bytes) == (4, 2 * one)
    for start, size, error in [(0, 0, "INVALID_REQUEST"), (-1, 1, "OFFSET_OUT_OF_RANGE")]:
        requested = pb.ListOffsetsPartition(partition=0, topic="t", offset_value=start, max_bytes=size)
        bad = (await served.broker.ListOffsets(pb.ListOffsetsRequest(partitions=[requested]))).offsets[0]
        assert bad.error.name == error


async def test_a_partition_owns_its_32_slots_of_the_ring(served: Served) -> None:
    await served.create(partitions=3)
    for p in range(3):
        info = await served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(topic="t", partition=p))
        assert (info.range_start, info.range_stop) == (32 * p, 32 * p + 32)
        assert (info.hwm, info.leader, list(info.replicas), len(info.topic_id)) == (0, 1, [1], 16)
    request = pb.GetPartitionRangeInfoRequest(topic="t", partition=3)
    assert (await fails(served.broker.GetPartitionRangeInfo(request))).name == "UNKNOWN_PARTITION"


# ------------------------------------------------------------------------------------------------------- groups
async def commit(served: Served, offset: int, **fields: Any) -> None:
    partition = pb.PartitionOffset(**{"partition": 0, "topic": "t", "offset": offset, **fields})
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group="g", offsets=[partition]))


async def committed(served: Served, group: str = "g", **fields: Any) -> list[tuple[int, int, str]]:
    response = await served.broker.FetchOffsets(pb.FetchOffsetsRequest(group=group, **fields))
    return sorted((o.partition, o.offset, o.metadata) for o in response.offsets)


async def test_a_commit_is_read_back_overwritten_and_survives_a_restart(tmp_path: Path) -> None:
    async with served_node(tmp_path) as served:
        await served.create(partitions=3)
        assert await committed(served) == []
        await commit(served, 0, partition=2, metadata="m")
        await commit(served, 0, partition=0)
        await served.fill([9])
        await commit(served, 7, partition=0)
        assert await committed(served) == [(0, 7, ""), (2, 0, "m")]
        only = [pb.TopicPartition(topic="t", partition=1), pb.TopicPartition(topic="t", partition=2)]
        assert await committed(served, partitions=only) == [(2, 0, "m")]
        assert await committed(served, "another") == []
    async with served_node(tmp_path) as served:
        assert await committed(served) == [(0, 7, ""), (2, 0, "m")]


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (pb.CommitOffsetsRequest(group="g"), "INVALID_REQUEST"),
        (pb.CommitOffsetsRequest(offsets=[pb.PartitionOffset(partition=0, topic="t")]), "INVALID_REQUEST"),
        (
            pb.CommitOffsetsRequest(group="g", offsets=[pb.PartitionOffset(partition=0, topic="t", offset=-1)]),
            "INVALID_OFFSET",
        ),
        (
            pb.CommitOffsetsRequest(group="g", offsets=[pb.PartitionOffset(partition=0, offset=1, topic="absent")]),
            "UNKNOWN_TOPIC",
        ),
        (
            pb.CommitOffsetsRequest(group="g", offsets=[pb.PartitionOffset(topic="t", partition=9, offset=1)]),
            "UNKNOWN_PARTITION",
        ),
        (
            pb.CommitOffsetsRequest(group="g", offsets=[pb.PartitionOffset(partition=0, topic="t")], request_id=b"x"),
            "INVALID_REQUEST",
        ),
        (
            pb.CommitOffsetsRequest(group="g", offsets=[pb.PartitionOffset(partition=0, topic="t")], timeout_ms=-1),
            "INVALID_REQUEST",
        ),
    ],
)
async def test_a_commit_that_makes_no_sense_is_refused(
    served: Served, request_: pb.CommitOffsetsRequest, name: str
) -> None:
    await served.create()
    assert (await fails(served.broker.CommitOffsets(request_))).name == name


# ------------------------------------------------------------------------------------------------------- topics
async def describe(served: Served, *topics: str) -> pb.DescribeClusterResponse:
    response: pb.DescribeClusterResponse = await served.admin.DescribeCluster(
        pb.DescribeClusterRequest(topics=topics, linearizable=True)
    )
    return response


async def test_topics_are_created_described_altered_grown_and_deleted(served: Served) -> None:
    create = pb.CreateTopicRequest(
        name="t", partition_count=2, config={"max.message.bytes": "5000"}, start_offset=7, request_id=b"r" * 16
    )
    created = await served.admin.CreateTopic(create)
    again = await served.admin.CreateTopic(create)
    assert again.topic_id == created.topic_id
    assert len(created.topic_id) == 16
    (topic,) = (await describe(served)).topics
    assert (topic.name, dict(topic.config), topic.replication_factor) == ("t", {"max.message.bytes": "5000"}, 1)
    assert [(p.partition, p.log_start, p.hwm, p.next_offset) for p in topic.partitions] == [
        (0, 7, 7, 7),
        (1, 7, 7, 7),
    ]
    await served.admin.AddPartitions(pb.AddPartitionsRequest(name="t", partition_count=3))
    await served.admin.AlterTopic(pb.AlterTopicRequest(name="t", unset=["max.message.bytes"]))
    (topic,) = (await describe(served, "t")).topics
    assert (len(topic.partitions), dict(topic.config)) == (3, {})
    await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
    assert list((await describe(served)).topics) == []
    assert (await fails(describe(served, "t"))).name == "UNKNOWN_TOPIC"


async def test_committed_offsets_are_forgotten_one_by_one(served: Served) -> None:
    await served.create(partitions=3)
    for partition in range(3):
        await commit(served, 0, partition=partition)
    places = [pb.TopicPartition(topic="t", partition=p) for p in (0, 2)]
    request = pb.DeleteOffsetsRequest(group="g", partitions=places, request_id=b"i" * 16)
    await served.admin.DeleteOffsets(request)
    assert [partition for partition, _, _ in await committed(served)] == [1]
    await commit(served, 0, partition=0)
    await served.admin.DeleteOffsets(request)  # a repetition of the same request
    assert [partition for partition, _, _ in await committed(served)] == [0, 1]
    unknown = pb.DeleteOffsetsRequest(group="unknown", partitions=places)
    assert (await fails(served.admin.DeleteOffsets(unknown))).name == "UNKNOWN_GROUP"
    nowhere = pb.DeleteOffsetsRequest(group="g", partitions=[pb.TopicPartition(topic="t", partition=3)])
    assert (await fails(served.admin.DeleteOffsets(nowhere))).name == "UNKNOWN_PARTITION"
    assert (await fails(served.admin.DeleteOffsets(pb.DeleteOffsetsRequest(group="g")))).name == "INVALID_REQUEST"


async def test_a_view_says_which_ends_are_not_known_and_asks_only_if_it_must(served: Served) -> None:
    await served.create(partitions=2)
    await served.fill([5])
    await commit(served, 2)
    node = served.server.node
    real, asked = node.partition_ranges, []

    def ranges(partitions: Any, timeout_ms: int, done: Any, *, at_leader: bool = False) -> None:
        """The leader of partition 0 does not answer."""
        asked.append(list(partitions))
        late = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "m")

        def replaced(found: Any) -> None:
            done([late if name == ("t", 0) else range_ for name, range_ in zip(partitions, found, strict=True)])

        real(partitions, timeout_ms, replaced, at_leader=at_leader)

    node.partition_ranges = ranges  # type: ignore[method-assign]  # this node's alone
    (topic,) = (await describe(served, "t")).topics
    assert [(p.hwm, p.end_unknown) for p in topic.partitions] == [(5, True), (0, False)]
    group = await served.admin.DescribeGroup(pb.DescribeGroupRequest(group="g"))
    (position,) = group.offsets
    assert (position.offset, position.end_unknown, position.HasField("lag")) == (2, True, False)
    assert (group.lag.HasField("lag"), group.lag.lag_at_least) == (False, 0)
    assert asked == [[("t", 0), ("t", 1)], [("t", 0)]]
    (topic,) = (await served.admin.DescribeCluster(pb.DescribeClusterRequest(topics=["t"]))).topics
    assert [p.end_unknown for p in topic.partitions] == [False, False]
    assert len(asked) == 2, "a view of what the node knows asks no leader"
    node.partition_ranges = real  # type: ignore[method-assign]  # as above
    (position,) = (await served.admin.DescribeGroup(pb.DescribeGroupRequest(group="g"))).offsets
    assert (position.lag, position.end_unknown) == (3, False)


@pytest.mark.parametrize(
    ("method", "request_", "name"),
    [
        ("CreateTopic", pb.CreateTopicRequest(name="t", partition_count=1), "TOPIC_EXISTS"),
        ("CreateTopic", pb.CreateTopicRequest(name="a b", partition_count=1), "INVALID_TOPIC_NAME"),
        ("CreateTopic", pb.CreateTopicRequest(name="", partition_count=1), "INVALID_TOPIC_NAME"),
        ("CreateTopic", pb.CreateTopicRequest(name="n"), "INVALID_PARTITION_COUNT"),
        ("CreateTopic", pb.CreateTopicRequest(name="n", partition_count=-1), "INVALID_PARTITION_COUNT"),
        ("CreateTopic", pb.CreateTopicRequest(name="n", partition_count=2**31 - 1), "INVALID_PARTITION_COUNT"),
        (
            "CreateTopic",
            pb.CreateTopicRequest(name="n", partition_count=1, replication_factor=2),
            "INVALID_REPLICATION_FACTOR",
        ),
        ("CreateTopic", pb.CreateTopicRequest(name="n", partition_count=1, config={"colour": "1"}), "INVALID_CONFIG"),
        ("CreateTopic", pb.CreateTopicRequest(name="n", partition_count=1, start_offset=-1), "INVALID_OFFSET"),
        ("CreateTopic", pb.CreateTopicRequest(name="n", partition_count=1, request_id=b"1"), "INVALID_REQUEST"),
        ("DeleteTopic", pb.DeleteTopicRequest(name="absent"), "UNKNOWN_TOPIC"),
        ("AddPartitions", pb.AddPartitionsRequest(name="t", partition_count=0), "INVALID_PARTITION_COUNT"),
        ("AddPartitions", pb.AddPartitionsRequest(name="absent", partition_count=3), "UNKNOWN_TOPIC"),
        ("AlterTopic", pb.AlterTopicRequest(name="t", set={"colour": "1"}), "INVALID_CONFIG"),
        ("AlterTopic", pb.AlterTopicRequest(name="absent", unset=["retention.ms"]), "UNKNOWN_TOPIC"),
        ("DeleteRecords", pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=-2), "INVALID_OFFSET"),
        ("DeleteRecords", pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=6), "OFFSET_OUT_OF_RANGE"),
        ("DeleteRecords", pb.DeleteRecordsRequest(topic="t", partition=1, before_offset=1), "UNKNOWN_PARTITION"),
        ("DeleteRecords", pb.DeleteRecordsRequest(partition=0, topic="absent", before_offset=1), "UNKNOWN_TOPIC"),
    ],
)
async def test_an_administration_that_makes_no_sense_is_a_typed_error(
    served: Served, method: str, request_: Any, name: str
) -> None:
    await served.create()
    await served.fill([5])
    detail = await fails(getattr(served.admin, method)(request_))
    assert (detail.name, detail.definite) == (name, True)
    assert detail.message


async def test_delete_records_moves_log_start_and_minus_one_means_all(served: Served) -> None:
    await served.create()
    await served.fill([5, 5])
    moved = await served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=7))
    assert moved.log_start == 7
    (partition,) = await fetch(served, part(6))
    assert (partition.error.name, partition.error.lo, partition.error.hi) == ("OFFSET_OUT_OF_RANGE", 7, 10)
    assert (
        await served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=-1))
    ).log_start == 10
    (answer,) = await served.publish(publish_request([b"x"]))
    assert answer.base_offset == 10


# -------------------------------------------------------------------------------------------------------- views
async def test_the_cluster_and_the_node_describe_themselves(served: Served) -> None:
    await served.create()
    await served.fill([4])
    cluster = await describe(served)
    assert (cluster.cluster_id, cluster.raft_leader) == ("c", 1)
    (node,) = cluster.nodes
    assert node.grpc_address == f"127.0.0.1:{served.server.grpc_address[1]}"
    assert (node.fenced, node.incarnation > 0) == (False, True)
    (info,) = cluster.topics[0].partitions
    assert (info.leader, info.leader_available, list(info.replicas), info.hwm) == (1, True, [1], 4)
    status = await served.admin.NodeStatus(pb.NodeStatusRequest(with_digest=True))
    assert (status.node, status.is_ready, status.raft_leader, bool(status.digest)) == (1, True, 1, True)
    (replica,) = status.replicas
    assert (replica.topic, replica.partition, replica.is_leader, replica.hwm, replica.durable_end) == (
        "t",
        0,
        True,
        4,
        4,
    )
    assert not (await served.admin.NodeStatus(pb.NodeStatusRequest())).digest


async def test_a_deadline_that_is_too_short_is_a_typed_or_plain_timeout_not_a_hang(served: Served) -> None:
    await served.create()
    served.server.node.stop()  # nothing answers any more
    request = pb.GetPartitionRangeInfoRequest(partition=0, topic="t", timeout_ms=100)
    detail = await fails(served.broker.GetPartitionRangeInfo(request))
    assert detail.retriable


# -------------------------------------------------------------------------------------------------------- users
def credential(mechanism: str = "SCRAM-SHA-256", **fields: Any) -> pb.ScramCredential:
    given: dict[str, Any] = {"iterations": 4_096, "salt": b"s", "stored_key": b"k" * 32, "server_key": b"v" * 32}
    return pb.ScramCredential(mechanism=mechanism, **(given | fields))


async def test_a_user_is_made_once_and_changed_only_if_it_is_there(served: Served) -> None:
    admin, one = served.admin, [credential()]
    new = pb.AlterUserRequest(name="a", credentials=one, must_be_new=True, request_id=b"1" * 16)
    await admin.AlterUser(new)
    await admin.AlterUser(new)  # a retry
    secret = served.server.node.state.decoy_secret
    assert len(secret) == 32
    for request, code in (
        (pb.AlterUserRequest(name="a", credentials=one, must_be_new=True), ErrorCode.USER_EXISTS),
        (pb.AlterUserRequest(name="b", credentials=one, must_exist=True), ErrorCode.UNKNOWN_USER),
        (pb.AlterUserRequest(name="b"), ErrorCode.INVALID_CREDENTIAL),
        (pb.AlterUserRequest(name="", credentials=one), ErrorCode.INVALID_CREDENTIAL),
        (pb.AlterUserRequest(name="b", credentials=[credential("PLAIN")]), ErrorCode.INVALID_CREDENTIAL),
        (pb.AlterUserRequest(name="b", credentials=[credential(iterations=1)]), ErrorCode.INVALID_CREDENTIAL),
        (pb.AlterUserRequest(name="b", credentials=[credential(salt=b"s" * 300)]), ErrorCode.INVALID_REQUEST),
    ):
        assert (await fails(admin.AlterUser(request))).name == code.name, request
    assert (await fails(admin.DeleteUser(pb.DeleteUserRequest(name="b")))).name == "UNKNOWN_USER"
    users = (await admin.ListUsers(pb.ListUsersRequest())).users
    assert [(u.name, u.mechanisms, u.iterations) for u in users] == [("a", ["SCRAM-SHA-256"], [4_096])]
    await admin.DeleteUser(pb.DeleteUserRequest(name="a"))
    assert not served.server.node.state.users
    await admin.AlterUser(pb.AlterUserRequest(name="a", credentials=one))
    assert served.server.node.state.decoy_secret == secret


def rule(name: str = "t", **fields: Any) -> pb.Acl:
    given = {"resource": "topic", "pattern": "literal", "user": "a", "host": "*", "permission": "allow"}
    return pb.Acl(**({"name": name, "operation": "read"} | given | fields))


async def test_rules_are_changed_together_and_decide(tmp_path: Path) -> None:
    async with served_node(tmp_path, super_users=("root",)) as served:
        admin = served.admin
        await admin.AlterAcls(pb.AlterAclsRequest(add=[rule(), rule("x", permission="deny", pattern="prefixed")]))
        assert sorted(acl.name for acl in (await admin.ListAcls(pb.ListAclsRequest())).acls) == ["t", "x"]
        for user, name, allowed, by in (("a", "t", True, "t"), ("a", "xy", False, "x"), ("b", "t", False, "")):
            asked = pb.TestAclRequest(user=user, host="h", operation="describe", resource="topic", name=name)
            asked.operation = "read" if name == "xy" else "describe"
            found = await admin.TestAcl(asked)
            assert (found.allowed, found.rule.name, found.super_user) == (allowed, by, False)
        root = pb.TestAclRequest(user="root", host="h", operation="alter", resource="cluster", name="kafka-cluster")
        found = await admin.TestAcl(root)
        assert (found.allowed, found.super_user, found.HasField("rule")) == (True, True, False)
        for request in (
            pb.AlterAclsRequest(),
            pb.AlterAclsRequest(add=[rule(resource="planet")], remove=[rule()]),
            pb.AlterAclsRequest(add=[rule(), rule(user="")], remove=[rule()]),
            pb.AlterAclsRequest(add=[rule("other", resource="cluster")], remove=[rule()]),
            pb.AlterAclsRequest(add=[rule(permission="deny", host="10.0.0.0/8")], remove=[rule()]),
        ):
            assert (await fails(admin.AlterAcls(request))).name == "INVALID_REQUEST"
        await admin.AlterAcls(pb.AlterAclsRequest(remove=[rule(), rule("never")]))
        assert [acl.name for acl in (await admin.ListAcls(pb.ListAclsRequest())).acls] == ["x"]


async def test_quotas_are_changed_together(tmp_path: Path) -> None:
    async with served_node(tmp_path) as served:
        admin = served.admin
        alice, each = pb.Quota(user="alice", key="producer_byte_rate"), pb.Quota(client_id="", key="request_percentage")
        alice.value, each.value = 1024, 12.5
        await admin.AlterQuotas(pb.AlterQuotasRequest(quotas=[alice, each]))
        assert list((await admin.ListQuotas(pb.ListQuotasRequest())).quotas) == [each, alice]
        for quotas in (
            [],
            [pb.Quota(user="bob", key="request_percentage", value=1), pb.Quota(user="bob", key="records", value=1)],
            [pb.Quota(key="request_percentage", value=1)],
            [pb.Quota(user="bob", key="request_percentage")],
            [pb.Quota(user="bob", key="producer_byte_rate", value=0.5)],
            [pb.Quota(ip="example.org", key="connection_creation_rate", value=1)],
        ):
            assert (await fails(admin.AlterQuotas(pb.AlterQuotasRequest(quotas=quotas)))).name == "INVALID_REQUEST"
        each.value = 0
        await admin.AlterQuotas(pb.AlterQuotasRequest(quotas=[each]))
        assert list((await admin.ListQuotas(pb.ListQuotasRequest())).quotas) == [alice]


async def test_acts_are_in_the_audit_log_without_secrets(tmp_path: Path) -> None:
    async with served_node(tmp_path) as served:
        admin = served.admin
        await admin.CreateTopic(
            pb.CreateTopicRequest(name="audited", partition_count=1, config={"cleanup.policy": "delete"})
        )
        await fails(admin.DeleteTopic(pb.DeleteTopicRequest(name="missing")))
        await admin.AlterUser(pb.AlterUserRequest(name="eve", credentials=[credential()]))
        await admin.AlterAcls(pb.AlterAclsRequest(add=[rule()]))
        await admin.ListAcls(pb.ListAclsRequest())
    text = (tmp_path / "data" / "audit.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert [(line["act"], line["result"], line["port"]) for line in found] == [
        ("CreateTopic", "done", "grpc"),
        ("DeleteTopic", "failed", "grpc"),
        ("AlterUser", "done", "grpc"),
        ("AlterAcls", "done", "grpc"),
    ]
    assert found[0]["on"] == ["name audited", "partition_count 1", "config cleanup.policy=delete"]
    assert found[1]["errors"] == {"": "UNKNOWN_TOPIC"}
    assert found[2]["on"] == ["name eve"]
    assert "user=a" in found[3]["on"][0]
    assert {line["address"] for line in found} == {"127.0.0.1"}
