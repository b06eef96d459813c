"""Bad input on real nodes: each gets a typed error that says what to do, disturbs no client, and stores nothing."""

from collections.abc import Callable, Iterator

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


@pytest.mark.parametrize("factor", [-1, 4])
def test_replication_factor_without_as_many_nodes_is_refused(cluster: Cluster, factor: int) -> None:
    node = cluster.nodes[1].raw
    raises(ErrorCode.INVALID_REPLICATION_FACTOR, lambda: node.create_topic("copied", replication_factor=factor))
