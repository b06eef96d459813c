"""What every node says of one partition, on three real nodes: its ends, its bytes, new records, a group's position.

How one node gives out offsets, and where its readers start, is tested in tests/unit/coordinator/grpc over the same
services.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import key_partition, ring_range
from smq.records import decode_batch
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode, batch_of
from tests.cluster.raw import raises

START = 2**40  # everything must be the same far out
LO, HI = START + 3, START + 10  # ten records are published and the first three deleted


@pytest.fixture
def trimmed(new_topic: Callable[..., str], leader_of: Callable[..., RawNode]) -> tuple[str, RawNode]:
    """A topic whose records LO .. HI - 1 are there, one batch each; and its leader."""
    topic = new_topic(start_offset=START)
    leader = leader_of(topic)
    for offset in range(START, HI):
        assert leader.publish_values(topic, 0, [b"%d" % offset]).base_offset == offset
    request = pb.DeleteRecordsRequest(topic=topic, partition=0, before_offset=LO, timeout_ms=10_000)
    assert leader.call(leader.admin.DeleteRecords, request).log_start == LO
    return topic, leader


def test_an_empty_partition_owns_its_ring_range_and_ends_at_0(cluster: Cluster, new_topic: Callable[..., str]) -> None:
    topic = new_topic(3)
    for node in cluster.alive():
        for number in range(3):
            info = node.raw.range_info(topic, number)
            assert (info.range_start, info.range_stop) == (32 * number, 32 * number + 32)
            assert (info.log_start, info.lso, info.hwm, info.next_offset) == (0, 0, 0, 0)
    for key in (b"", b"AA", b"UA", b"a longer key"):
        info = cluster.nodes[1].raw.range_info(topic, key_partition(key, 3))
        assert (info.range_start, info.range_stop) == ring_range(key_partition(key, 3))


def test_a_fetch_below_the_start_or_past_the_end_names_the_range_and_one_at_the_end_is_empty(
    cluster: Cluster, trimmed: tuple[str, RawNode]
) -> None:
    topic, _ = trimmed
    cluster.wait_converged(topic, 1)
    for node in cluster.alive():
        for offset in (-1, LO - 1, HI + 1, 2**62):
            error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, partial(node.raw.fetch, topic, 0, offset))
            assert (error.details.lo, error.details.hi) == (LO, HI)
        at_end = node.raw.fetch(topic, 0, HI)
        assert (list(at_end.batches), at_end.hwm, at_end.log_start) == ([], HI, LO)


def test_a_group_resumes_at_exactly_the_next_record(cluster: Cluster, trimmed: tuple[str, RawNode]) -> None:
    topic, leader = trimmed
    group = f"g-{topic}"
    leader.commit(group, topic, 0, HI - 3)
    for node in cluster.alive():
        assert node.raw.committed(group, topic, 0) == HI - 3
        stream = node.raw.subscribe(
            topic=topic, partition=0, offset_type=pb.RESUME_OR_EARLIEST, group=group, stop_at_end=True
        )
        read = [(record.offset, record.value) for answer in stream for record in answer.records]
        assert read == [(offset, b"%d" % offset) for offset in range(HI - 3, HI)]


def test_a_fetch_at_the_end_is_woken_by_the_next_append(cluster: Cluster, trimmed: tuple[str, RawNode]) -> None:
    topic, leader = trimmed
    cluster.wait_converged(topic, 1)
    answers: queue.Queue[pb.FetchedPartition] = queue.Queue()
    for node in cluster.alive():
        threading.Thread(
            target=lambda raw=node.raw: answers.put(raw.fetch(topic, 0, HI, max_wait_ms=20_000)), daemon=True
        ).start()
    leader.publish_values(topic, 0, [b"news"])
    for _ in cluster.alive():
        assert [batch.last_offset for batch in answers.get(timeout=15).batches] == [HI]


def test_the_bytes_are_the_same_in_every_codec(
    cluster: Cluster, new_topic: Callable[..., str], leader_of: Callable[..., RawNode]
) -> None:
    topic = new_topic()
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        leader_of(topic).publish_batch(topic, 0, batch_of([b"value-" * 50] * 20, key=b"k", codec=codec))
    cluster.wait_converged(topic, 1)
    copies = [
        [(b.base_offset, b.last_offset, b.ts_ns, b.data) for b in node.raw.fetch(topic, 0, 0).batches]
        for node in cluster.alive()
    ]
    assert copies[0] == copies[1] == copies[2]
    assert [record.offset for batch in copies[0] for record in decode_batch(batch[3])] == list(range(100))


def test_one_that_does_not_lead_takes_no_record_and_names_the_leader(
    cluster: Cluster, trimmed: tuple[str, RawNode]
) -> None:
    topic, _ = trimmed
    leader = cluster.wait_leader(topic, 0)
    for node in cluster.alive():
        if node.id != leader:
            error = raises(ErrorCode.NOT_LEADER, partial(node.raw.publish_values, topic, 0, [b"x"]))
            assert (error.details.leader, error.details.leader_address) == (leader, cluster.nodes[leader].grpc)
