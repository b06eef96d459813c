"""Retention on real nodes: log starts move on every replica, readers learn what is gone, the file stays bounded."""

import os
import secrets
from collections.abc import Iterator

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.records import NewRecord, encode_batch
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from smq.testing.node_process import wait_for
from tests.cluster.raw import raises

MIB = 1 << 20
RETAINED = 4 * MIB
ROUNDS = 25
ROUND_BATCHES = 16  # of half a MiB each: twice what is retained
SETTLED_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("retention"), 3)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def file_bytes(cluster: Cluster) -> list[int]:
    """What each node's log and index take of its disk."""
    return [
        sum(file.stat().st_blocks * 512 for file in node.data_dir.rglob("*") if file.is_file())
        for node in cluster.nodes.values()
    ]


def await_start(node: RawNode, topic: str, offset: int) -> None:
    def is_there() -> bool:
        return node.list_offset(topic, 0, pb.RESET_TO_EARLIEST).offset == offset

    wait_for(f"{topic} begins at {offset}", is_there, SETTLED_S)


@pytest.mark.full
def test_a_file_stays_bounded_while_fifty_times_the_retained_size_is_written(cluster: Cluster) -> None:
    cluster.nodes[1].raw.create_topic("bounded", 1, config={"retention.bytes": str(RETAINED)})
    node = cluster.nodes[cluster.wait_leader("bounded", 0)].raw
    batch = encode_batch([NewRecord(None, os.urandom(MIB // 2), 1)])
    sizes: list[list[int]] = []
    for number in range(1, ROUNDS + 1):
        for _ in range(ROUND_BATCHES):
            node.publish_batch("bounded", 0, batch)
        kept_from = number * ROUND_BATCHES - RETAINED // (MIB // 2)
        await_start(node, "bounded", kept_from)
        sizes.append(file_bytes(cluster))
    early, late = sizes[ROUNDS // 5], sizes[-1]
    assert all(b <= 1.5 * a for a, b in zip(early, late, strict=True)), f"{early} after a fifth, {late} in the end"
    for other in cluster.nodes.values():
        error = raises(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            lambda raw=other.raw: raw.list_offset("bounded", 0, pb.EXACT_OFFSET, offset_value=0),  # type: ignore[misc]  # default binds the node
        )
        assert (error.details.lo, error.details.hi) == (ROUNDS * ROUND_BATCHES - 8, ROUNDS * ROUND_BATCHES)


def test_a_limit_set_later_deletes_old_records_and_keeps_young_ones(cluster: Cluster) -> None:
    cluster.nodes[1].raw.create_topic("aged", 1)
    node = cluster.nodes[cluster.wait_leader("aged", 0)].raw
    for value in (b"old", b"older"):
        node.publish_batch("aged", 0, encode_batch([NewRecord(None, value, 1_000)] * 3))
    node.publish_values("aged", 0, [b"young"])
    request = pb.AlterTopicRequest(name="aged", set={"retention.ms": "600000"}, request_id=secrets.token_bytes(16))
    node.call(node.admin.AlterTopic, request)
    for other in cluster.nodes.values():
        await_start(other.raw, "aged", 6)
    records = [
        r for a in node.subscribe(topic="aged", offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True) for r in a.records
    ]
    assert [(r.offset, r.value) for r in records] == [(6, b"young")]
