"""`smq mirror` from another smq, and from Kafka itself: killed on the way, compared, cut over; consumers go on."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from smq.coordinator.cli.mirror.kafka_side import KafkaSide
from smq.coordinator.cli.mirror.settings import KafkaSettings
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import CLI, end, run_cli, wait_for
from tests.kafka.kafka_node import kafka_node
from tests.pages import claimed

TABLE = {"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"}
SOURCES = ["smq", pytest.param("kafka", marks=[pytest.mark.full, pytest.mark.timeout(900)])]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The Kafka address of the other cluster."""
    directory = tmp_path / "source"
    directory.mkdir()
    if request.param == "kafka":
        with kafka_node(directory) as address:
            yield address
    else:
        with live_cluster(directory, 1) as made:
            yield made.nodes[1].kafka


async def produce(address: str, topic: str, count: int, *, keys: int = 0, **options: Any) -> None:
    async with AIOKafkaProducer(bootstrap_servers=address, **options) as producer:
        for i in range(count):
            key = b"k%d" % (i % keys) if keys else None
            await producer.send(topic, b"value %d" % i * 20, key=key, partition=i % 2, headers=[("h", b"%d" % i)])


async def fill(address: str) -> None:
    """Compressed batches, transactions of both ends, a table, and a group that has read a part."""
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    await admin.create_topics([NewTopic("orders", 2, 1), NewTopic("logs-table", 2, 1, topic_configs=TABLE)])
    await admin.close()
    await produce(address, "orders", 2_000, compression_type="gzip")
    await produce(address, "orders", 2_000, enable_idempotence=True)
    for _ in range(3):
        await produce(address, "logs-table", 400, keys=7)
        await asyncio.sleep(0.3)  # another segment
    async with AIOKafkaProducer(bootstrap_servers=address, transactional_id="t") as producer:
        for i in range(6):
            await producer.begin_transaction()
            await producer.send_and_wait("orders", b"transaction %d" % i, partition=0)
            await (producer.commit_transaction() if i % 2 else producer.abort_transaction())
    async with AIOKafkaConsumer(bootstrap_servers=address, group_id="readers", enable_auto_commit=False) as consumer:
        consumer.assign([TopicPartition("orders", 0), TopicPartition("orders", 1)])
        await consumer.commit({TopicPartition("orders", 0): 1_234, TopicPartition("orders", 1): 5})


async def has_gap(address: str) -> bool:
    async with KafkaSide(KafkaSettings(bootstrap=address), "source") as side:
        piece = await side.fetch_one(("logs-table", 0), 0)
        return int.from_bytes(piece.batches[0][:8], "big") > 0


async def next_record(address: str) -> tuple[int, bytes | None]:
    """The first one that a member of the group gets, which it commits."""
    consumer = AIOKafkaConsumer("orders", bootstrap_servers=address, group_id="readers", enable_auto_commit=False)
    async with consumer:
        async for record in consumer:
            if record.partition == 0:
                await consumer.commit({TopicPartition("orders", 0): record.offset + 1})
                return record.offset, record.value
    raise AssertionError


def address_of(cluster: Cluster) -> str:
    return ",".join(node.grpc for node in cluster.nodes.values())


def mirror(verb: str, config: Path, target: Cluster, *options: str) -> Any:
    done = run_cli("mirror", verb, "--config", str(config), "--bootstrap", address_of(target), "--json", *options)
    assert not done.returncode, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def copied(config: Path, target: Cluster) -> int:
    return sum(row["end"] for row in mirror("status", config, target))


def records_of(topic: str, compared: list[dict[str, Any]]) -> int:
    """Of one that no compaction makes smaller meanwhile."""
    return sum(row["records"] for row in compared if row["topic"] == topic)


def is_beyond(offsets: int, config: Path, target: Cluster) -> bool:
    return copied(config, target) > offsets


def test_a_copy_survives_kill_9_is_the_same_log_and_is_cut_over(
    source: str, own_cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = own_cluster
    asyncio.run(fill(source))
    if "kafka" in request.node.name:
        wait_for("Kafka has compacted the table", lambda: asyncio.run(has_gap(source)), 120)
    config = tmp_path / "mirror.toml"
    (page,) = claimed("docs/operations.md", __file__)
    page = page.replace("kafka-1:9092", source)
    config.write_text(page.replace("= 50000000", "= 5000"))  # all of it would take minutes
    command = [*CLI, "mirror", "run", "--config", str(config), "--bootstrap", address_of(target)]
    for _ in range(2):
        before = copied(config, target)
        running = subprocess.Popen(command)
        try:
            wait_for("something is copied", partial(is_beyond, before, config, target))
        finally:
            end(running, signal.SIGKILL)
        assert copied(config, target) < 4_000
    asyncio.run(produce(source, "orders", 500, compression_type="lz4"))
    config.write_text(page)
    assert not mirror("run", config, target, "--once")["problems"]

    assert all(row["lag"] == 0 for row in mirror("status", config, target))
    compared = mirror("verify", config, target)
    assert all(row["is_copy"] for row in compared)
    assert records_of("orders", compared) == 4_000 + 6 + 6 + 500
    assert all(row["equal_ranges"] for row in compared if row["topic"] == "orders")

    bootstrap = ",".join(node.kafka for node in target.nodes.values())
    assert asyncio.run(next_record(bootstrap)) == (1_234, b"value %d" % 468 * 20)  # and commits
    (end_before,) = [
        row["end"] for row in mirror("status", config, target) if (row["topic"], row["partition"]) == ("orders", 0)
    ]
    assert mirror("cutover", config, target)["topics"] == ["logs-table", "orders"]

    async def own() -> int:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
            return int((await producer.send_and_wait("orders", b"first", partition=0)).offset)

    assert asyncio.run(own()) == end_before
    given = mirror("rollback", config, target)
    assert (given["topics"], given["records"], given["commits"]) == (["logs-table", "orders"], 1, 1)
    assert asyncio.run(next_record(source)) == (1_235, b"value %d" % 470 * 20)
    asyncio.run(produce(source, "orders", 100))
    assert not mirror("run", config, target, "--once")["problems"]
    after = mirror("verify", config, target)
    assert all(row["is_copy"] for row in after)
    assert records_of("orders", after) - records_of("orders", compared) == 101
