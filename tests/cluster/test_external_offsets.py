"""Offsets without records, on three real nodes: the Assignment lines of the behaviour checklist over AssignOffsets."""

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from smq.clients import ErrorCode, OffsetAssigner, SmqError, SyncAdmin, SyncConsumer, SyncOffsetAssigner, SyncProducer
from smq.testing.cluster import Cluster

EXTERNAL = {"storage": "external"}
Range = tuple[int, int]


def bootstrap(cluster: Cluster) -> str:
    return ",".join(node.grpc for node in cluster.alive())


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[SyncAdmin]:
    with SyncAdmin(bootstrap(cluster)) as admin:
        yield admin


@pytest.fixture
def topic(admin: SyncAdmin) -> str:
    """Of two partitions, under a name of its own."""
    name = f"external-{secrets.token_hex(4)}"
    admin.create_topic(name, 2, config=EXTERNAL)
    return name


@pytest.fixture
def assigner(cluster: Cluster) -> Iterator[SyncOffsetAssigner]:
    with SyncOffsetAssigner(bootstrap(cluster)) as assigner:
        yield assigner


def refused(code: ErrorCode) -> "pytest.RaisesExc[SmqError]":
    return pytest.raises(SmqError, check=lambda error: error.code is code)


def test_ten_singles_give_0_to_9_and_the_mark_follows_on_request(
    admin: SyncAdmin, assigner: SyncOffsetAssigner, topic: str
) -> None:
    assert admin.partition_range(topic, 0).next_offset == 0
    assert [assigner.assign(topic, 0) for _ in range(10)] == [(n, n) for n in range(10)]
    assert admin.partition_range(topic, 0).hwm == 0
    assert assigner.advance(topic, 0, 10) == 10
    assert assigner.advance(topic, 0, 3) == 10
    found = admin.partition_range(topic, 0)
    assert (found.log_start, found.hwm, found.next_offset, found.replicas) == (0, 10, 10, ())


def test_batches_of_5_and_3_and_a_range_of_its_own_in_the_other_partition(
    assigner: SyncOffsetAssigner, topic: str
) -> None:
    given = [assigner.assign(topic, 0, 5), assigner.assign(topic, 1, 2), assigner.assign(topic, 0, 3)]
    assert given == [(0, 4), (0, 1), (5, 7)]


def test_impossible_requests_are_refused_saying_why(admin: SyncAdmin, assigner: SyncOffsetAssigner, topic: str) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        assigner.assign(topic, 0, 0)
    with refused(ErrorCode.OFFSET_OUT_OF_RANGE):
        assigner.advance(topic, 0, 1)
    with refused(ErrorCode.UNKNOWN_PARTITION):
        assigner.assign(topic, 2)
    ordinary = f"{topic}-log"
    admin.create_topic(ordinary)
    with refused(ErrorCode.WRONG_STORAGE):
        assigner.assign(ordinary, 0)


def test_records_are_neither_taken_nor_given(cluster: Cluster, topic: str) -> None:
    with SyncProducer(bootstrap(cluster)) as producer, refused(ErrorCode.WRONG_STORAGE):
        producer.send(topic, b"v").result(timeout=30)
    with SyncConsumer(bootstrap(cluster)) as consumer:
        consumer.assign([(topic, 0)], "RESET_TO_EARLIEST")
        with refused(ErrorCode.WRONG_STORAGE):
            consumer.getmany(timeout_ms=30_000)


async def _assign_concurrently(cluster: Cluster, topic: str) -> list[Range]:
    """Ten callers of 100, each at a node of its own choice, half of them repeating every request at another node."""
    addresses = [node.grpc for node in cluster.alive()]

    async def caller(number: int) -> list[Range]:
        given = []
        async with OffsetAssigner(addresses[number % 3]) as here, OffsetAssigner(addresses[(number + 1) % 3]) as there:
            for _ in range(100):
                request_id = secrets.token_bytes(16)
                first = await here.assign(topic, 0, request_id=request_id)
                if number % 2:
                    assert await there.assign(topic, 0, request_id=request_id) == first
                given.append(first)
        return given

    return [r for ranges in await asyncio.gather(*map(caller, range(10))) for r in ranges]


def test_ten_callers_of_100_on_all_nodes_get_exactly_0_to_999(cluster: Cluster, topic: str) -> None:
    given = asyncio.run(_assign_concurrently(cluster, topic))
    assert sorted(given) == [(n, n) for n in range(1000)]


async def _assign_through_a_kill(cluster: Cluster, topic: str) -> list[Range]:
    is_killed = asyncio.Event()

    async with OffsetAssigner(bootstrap(cluster)) as assigner:

        async def caller() -> list[Range]:
            given, left = [], 20
            while left:
                given.append(await assigner.assign(topic, 0, 3))
                left -= is_killed.is_set()
            return given

        tasks = [asyncio.create_task(caller()) for _ in range(5)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(cluster.kill, cluster.raft_leader())
        is_killed.set()
        return [r for ranges in await asyncio.gather(*tasks) for r in ranges]


def test_kill_of_the_raft_leader_gives_no_offset_twice_and_loses_none(fault_cluster: Cluster) -> None:
    with SyncAdmin(bootstrap(fault_cluster)) as admin:
        topic = f"external-{secrets.token_hex(4)}"
        admin.create_topic(topic, config=EXTERNAL)
        given = asyncio.run(_assign_through_a_kill(fault_cluster, topic))
        assert sorted(given) == [(3 * n, 3 * n + 2) for n in range(len(given))]
        fault_cluster.heal()
        assert admin.partition_range(topic, 0).next_offset == 3 * len(given)
