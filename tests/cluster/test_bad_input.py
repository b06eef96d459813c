"""Bad input on real nodes: each gets a typed error that says what to do, disturbs no client, and stores nothing."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode, batch_of
from tests.cluster.raw import raises

NewTopic = Callable[..., str]
LeaderOf = Callable[..., RawNode]

BATCH_BYTES_DEFAULT = 1_048_588


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    return new_topic()


@pytest.fixture
def node(topic: str, leader_of: LeaderOf) -> Iterator[RawNode]:
    """The leader; whatever the test did to it, it still works afterwards and holds nothing of it."""
    leader = leader_of(topic)
    yield leader
    before = leader.range_info(topic, 0)
    assert leader.publish_values(topic, 0, [b"still works"]).base_offset == before.hwm
    assert set(leader.read_all(topic, 0).values()) == {b"still works"}


def test_unknown_topic_is_named_in_every_call(cluster: Cluster) -> None:
    node = cluster.nodes[1].raw
    calls: list[Callable[[], object]] = [
        lambda: node.publish_values("no-such", 0, [b"x"]),
        lambda: node.fetch("no-such", 0, 0),
        lambda: node.range_info("no-such", 0),
        lambda: node.list_offset("no-such", 0, pb.RESET_TO_LATEST),
        lambda: node.subscribe_first(topic="no-such", partition=0, offset_type=pb.RESET_TO_LATEST),
        lambda: node.commit("g", "no-such", 0, 0),
        lambda: node.start_session("no-such"),
        lambda: node.describe("no-such"),
        lambda: node.call(node.admin.DeleteTopic, pb.DeleteTopicRequest(name="no-such", timeout_ms=5_000)),
        lambda: node.call(
            node.admin.AddPartitions, pb.AddPartitionsRequest(name="no-such", partition_count=2, timeout_ms=5_000)
        ),
        lambda: node.call(
            node.admin.AlterTopic, pb.AlterTopicRequest(name="no-such", unset=["retention.ms"], timeout_ms=5_000)
        ),
    ]
    for call in calls:
        error = raises(ErrorCode.UNKNOWN_TOPIC, call)
        assert "no-such" in error.message
        assert "smq topic" in str(error)


@pytest.mark.parametrize("partition", [-1, 1, 2**31 - 1])
def test_partition_out_of_range_is_refused_in_every_call(topic: str, node: RawNode, partition: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: node.publish_values(topic, partition, [b"x"]),
        lambda: node.fetch(topic, partition, 0),
        lambda: node.range_info(topic, partition),
        lambda: node.list_offset(topic, partition, pb.RESET_TO_LATEST),
        lambda: node.subscribe_first(topic=topic, partition=partition, offset_type=pb.RESET_TO_LATEST),
        lambda: node.commit("g", topic, partition, 0),
    ]
    for call in calls:
        raises(ErrorCode.UNKNOWN_PARTITION, call)


def test_batch_larger_than_the_topic_allows_is_refused_with_the_limit(topic: str, node: RawNode) -> None:
    error = raises(ErrorCode.BATCH_TOO_LARGE, lambda: node.publish_values(topic, 0, [b"x" * (BATCH_BYTES_DEFAULT + 1)]))
    assert str(BATCH_BYTES_DEFAULT) in error.message


def test_batch_with_a_wrong_crc_is_refused_and_never_stored(topic: str, node: RawNode) -> None:
    batch = bytearray(batch_of([b"damaged on the way"]))
    batch[-1] ^= 0x40
    raises(ErrorCode.CORRUPT_BATCH, lambda: node.publish_batch(topic, 0, bytes(batch)))


@pytest.mark.parametrize("keep", [0, 1, 11, 12, 60, 61, -1])
def test_cut_batch_is_refused(topic: str, node: RawNode, keep: int) -> None:
    batch = batch_of([b"a whole record"])
    request = pb.PublishRecordRequest(partition=0, topic=topic, correlation_id=1, batch=batch[:keep])
    (answer,) = node.publish([request])
    assert answer.error.name in ("CORRUPT_BATCH", "INVALID_BATCH", "INVALID_REQUEST")


def test_batch_of_another_magic_is_refused(topic: str, node: RawNode) -> None:
    batch = bytearray(batch_of([b"old"]))
    batch[16] = 1
    raises(ErrorCode.INVALID_BATCH, lambda: node.publish_batch(topic, 0, bytes(batch)))


def test_one_bad_batch_in_a_stream_costs_the_others_nothing(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    bad = bytearray(batch_of([b"bad"]))
    bad[-1] ^= 1
    batches = [batch_of([b"1"]), bytes(bad), batch_of([b"2"])]
    requests = [
        pb.PublishRecordRequest(partition=0, topic=topic, correlation_id=i, batch=batch)
        for i, batch in enumerate(batches)
    ]
    answers = leader_of(topic).publish(requests)
    assert [answer.error.name for answer in answers] == ["", "CORRUPT_BATCH", ""]
    assert [answer.base_offset for answer in answers] == [0, -1, 1]


@pytest.mark.parametrize("config", [{"no.such.key": "1"}, {"max.message.bytes": "many"}, {"max.message.bytes": "-1"}])
def test_unknown_or_wrong_topic_config_is_refused_with_what_is_valid(
    cluster: Cluster, topic: str, config: dict[str, str]
) -> None:
    node = cluster.nodes[1].raw
    error = raises(ErrorCode.INVALID_CONFIG, lambda: node.create_topic("with-config", config=config))
    assert next(iter(config)) in error.message
    request = pb.AlterTopicRequest(name=topic, set=config, timeout_ms=5_000)
    raises(ErrorCode.INVALID_CONFIG, lambda: node.call(node.admin.AlterTopic, request))


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "x" * 250])
def test_topic_name_outside_the_alphabet_is_refused(cluster: Cluster, name: str) -> None:
    raises(ErrorCode.INVALID_TOPIC_NAME, lambda: cluster.nodes[1].raw.create_topic(name))


def test_topic_that_exists_is_not_created_again(cluster: Cluster, topic: str) -> None:
    raises(ErrorCode.TOPIC_EXISTS, lambda: cluster.nodes[2].raw.create_topic(topic))


@pytest.mark.parametrize("partitions", [0, -1, 2**31 - 1])
def test_partition_count_outside_the_limits_is_refused(cluster: Cluster, partitions: int) -> None:
    raises(ErrorCode.INVALID_PARTITION_COUNT, lambda: cluster.nodes[1].raw.create_topic("counted", partitions))


@pytest.mark.parametrize("factor", [-1, 4])
def test_replication_factor_without_as_many_nodes_is_refused(cluster: Cluster, factor: int) -> None:
    node = cluster.nodes[1].raw
    raises(ErrorCode.INVALID_REPLICATION_FACTOR, lambda: node.create_topic("copied", replication_factor=factor))


def test_request_to_a_node_that_does_not_lead_names_the_leader(cluster: Cluster, topic: str) -> None:
    leader = cluster.wait_leader(topic, 0)
    for node in cluster.alive():
        if node.id != leader:
            error = raises(ErrorCode.NOT_LEADER, partial(node.raw.publish_values, topic, 0, [b"x"]))
            assert error.details.leader == leader
            assert error.details.leader_address == cluster.nodes[leader].grpc


def test_session_that_was_never_started_is_unknown(topic: str, node: RawNode) -> None:
    records = pb.NewRecords(records=[pb.NewRecord(value=b"x")])
    (answer,) = node.publish(
        [pb.PublishRecordRequest(partition=0, session_id="never", correlation_id=1, records=records)]
    )
    assert answer.error.name == "UNKNOWN_SESSION"


def test_second_publishing_session_with_one_id_is_refused(topic: str, node: RawNode) -> None:
    node.start_session(topic, f"twice-{topic}")
    raises(ErrorCode.SESSION_EXISTS, lambda: node.start_session(topic, f"twice-{topic}"))


@pytest.mark.parametrize("offset", [-1, -(2**63)])
def test_negative_commit_is_refused(topic: str, node: RawNode, offset: int) -> None:
    raises(ErrorCode.INVALID_OFFSET, lambda: node.commit(f"g-{topic}", topic, 0, offset))
    assert node.committed(f"g-{topic}", topic, 0) is None


def test_delete_past_the_hwm_is_out_of_range_with_the_range(topic: str, node: RawNode) -> None:
    request = pb.DeleteRecordsRequest(topic=topic, partition=0, before_offset=5, timeout_ms=5_000)
    error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, lambda: node.call(node.admin.DeleteRecords, request))
    assert (error.details.lo, error.details.hi) == (0, 0)


def test_fetch_of_one_bad_partition_costs_the_others_nothing(new_topic: NewTopic, leader_of: LeaderOf) -> None:
    topic = new_topic()
    node = leader_of(topic)
    node.publish_values(topic, 0, [b"good"])
    assert node.read_all(topic, 0) == {0: b"good"}
    wanted = [
        pb.FetchPartition(topic="no-such", partition=0, offset=0),
        pb.FetchPartition(topic=topic, partition=0, offset=0),
        pb.FetchPartition(topic=topic, partition=9, offset=0),
    ]
    answer = node.call(node.broker.Fetch, pb.FetchRequest(partitions=wanted))
    assert [p.error.name for p in answer.partitions] == ["UNKNOWN_TOPIC", "", "UNKNOWN_PARTITION"]
    assert len(answer.partitions[1].batches) == 1
