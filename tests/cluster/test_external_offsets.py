"""Offsets without records, given out by three real nodes to many callers. What one node answers to each request is
tested in tests/unit/coordinator/grpc/test_offset_calls.py.
"""

import asyncio
import secrets

import pytest

from smq.clients import ErrorCode, OffsetAssigner, SmqError, SyncAdmin, SyncConsumer, SyncProducer
from smq.testing.cluster import Cluster

EXTERNAL = {"storage": "external"}
Range = tuple[int, int]


def bootstrap(cluster: Cluster) -> str:
    return ",".join(node.grpc for node in cluster.alive())


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """Under a name of its own."""
    name = f"external-{secrets.token_hex(4)}"
    with SyncAdmin(bootstrap(cluster)) as admin:
        admin.create_topic(name, config=EXTERNAL)
    return name


def test_records_are_neither_taken_nor_given(cluster: Cluster, topic: str) -> None:
    refused = pytest.raises(SmqError, check=lambda error: error.code is ErrorCode.WRONG_STORAGE)
    with SyncProducer(bootstrap(cluster)) as producer, refused:
        producer.send(topic, b"v").result(timeout=30)
    with SyncConsumer(bootstrap(cluster)) as consumer:
        consumer.assign([(topic, 0)], "RESET_TO_EARLIEST")
        with refused:
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
