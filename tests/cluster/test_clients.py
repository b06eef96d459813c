"""smq.clients against real nodes that die: the producer and consumer that users have, judged as strictly as our own."""

import asyncio
from collections.abc import Iterator

import pytest

from smq.clients.consumer import Consumer
from smq.clients.producer import Producer, RecordMetadata
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

PARTITIONS = 3
RECORDS = 3_000
PAUSE_EVERY = 50  # records between two yields: keeps the run longer than an election


@pytest.fixture
def topic(fault_cluster: Cluster) -> Iterator[str]:
    yield fault_cluster.make_topic(PARTITIONS)
    fault_cluster.wait_ready()


async def _produce_while(cluster: Cluster, topic: str, faults: "asyncio.Future[None]") -> dict[tuple[int, int], bytes]:
    """Publishes until the faults are over, and at least RECORDS; what was acknowledged, by place."""
    acked: dict[tuple[int, int], bytes] = {}
    bootstrap = [node.grpc for node in cluster.nodes.values()]
    async with Producer(bootstrap, linger_ms=1, delivery_timeout_ms=60_000) as producer:
        sent: list[tuple[bytes, asyncio.Future[RecordMetadata]]] = []
        while len(sent) < RECORDS or not faults.done():
            value = b"%d" % len(sent)
            await producer.wait_room()
            sent.append((value, producer.send(topic, value, partition=len(sent) % PARTITIONS)))
            if len(sent) % PAUSE_EVERY == 0:
                await asyncio.sleep(0.01)
        await producer.flush()
        for value, place in sent:
            metadata = await place
            acked[(metadata.partition, metadata.offset)] = value
        assert len(acked) == len(sent)
        assert producer.stats.leader_changes > 0
    await faults
    return acked


def _kill_the_leader(cluster: Cluster, topic: str, victims: list[int]) -> None:
    """Once the last victim is back."""
    cluster.restart(*victims[-1:])
    victims.append(cluster.wait_leader(topic, 0))
    cluster.kill(victims[-1])


def _kill_each_in_turn(cluster: Cluster, topic: str) -> None:
    for _ in range(2):
        victim = cluster.wait_leader(topic, 0)
        cluster.kill(victim)
        cluster.wait_leader(topic, 0, other_than=victim)
        cluster.restart(victim)


def test_client_producer_loses_and_repeats_nothing_over_leader_kills(fault_cluster: Cluster, topic: str) -> None:
    async def run() -> dict[tuple[int, int], bytes]:
        loop = asyncio.get_running_loop()
        faults = loop.run_in_executor(None, _kill_each_in_turn, fault_cluster, topic)
        return await _produce_while(fault_cluster, topic, asyncio.ensure_future(faults))

    acked = asyncio.run(run())
    fault_cluster.wait_converged(topic, PARTITIONS)
    for node in fault_cluster.alive():
        stored = {
            (partition, offset): value
            for partition in range(PARTITIONS)
            for offset, value in node.raw.read_all(topic, partition).items()
        }
        assert stored == acked


def test_client_consumer_reads_every_record_once_while_leaders_die(fault_cluster: Cluster, topic: str) -> None:
    for partition in range(PARTITIONS):
        leader = fault_cluster.nodes[fault_cluster.wait_leader(topic, partition)].raw
        for batch in range(10):
            leader.publish_values(topic, partition, [b"%d-%d" % (partition, 10 * batch + i) for i in range(10)])
    fault_cluster.wait_converged(topic, PARTITIONS)

    async def run() -> dict[int, list[bytes]]:
        read: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}
        bootstrap = [node.grpc for node in fault_cluster.nodes.values()]
        victims: list[int] = []
        async with Consumer(bootstrap, partition_max_bytes=200) as consumer:  # a batch: it is never far ahead
            await consumer.assign([(topic, partition) for partition in range(PARTITIONS)])
            async for record in consumer:
                assert record.offset == len(read[record.partition])
                read[record.partition].append(record.value or b"")
                count = sum(map(len, read.values()))
                if count in (50, 150):
                    await asyncio.to_thread(_kill_the_leader, fault_cluster, topic, victims)
                if count == 100 * PARTITIONS:
                    break
        fault_cluster.restart(victims[-1])
        return read

    read = asyncio.run(run())
    assert read == {p: [b"%d-%d" % (p, i) for i in range(100)] for p in range(PARTITIONS)}


def test_group_resumes_at_exactly_the_next_record_on_another_node_after_a_kill(
    fault_cluster: Cluster, topic: str
) -> None:
    leader = fault_cluster.nodes[fault_cluster.wait_leader(topic, 0)].raw
    leader.publish_values(topic, 0, [b"%d" % i for i in range(30)])
    bootstrap = [node.grpc for node in fault_cluster.nodes.values()]

    async def read(count: int) -> list[int]:
        async with Consumer(bootstrap, group="g-client") as consumer:
            await consumer.assign([(topic, 0)])
            offsets = await _first(consumer, count)
            await consumer.commit()
            return offsets

    assert asyncio.run(read(10)) == list(range(10))
    victim = fault_cluster.raft_leader()
    fault_cluster.kill(victim)
    wait_for("another Raft leader", lambda: fault_cluster.raft_leader() != victim)
    assert asyncio.run(read(20)) == list(range(10, 30))
    fault_cluster.restart(victim)


async def _first(consumer: Consumer, count: int) -> list[int]:
    """Offsets of the next `count` records."""
    offsets: list[int] = []
    async for record in consumer:
        offsets.append(record.offset)
        if len(offsets) == count:
            break
    return offsets
