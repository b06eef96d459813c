"""A consumer that names its rack reads from a replica in that rack, and from the leader if that replica is gone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap

RACKS = {1: "a", 2: "b", 3: "c"}
TOPIC = "t"
STEP = 200


@pytest.fixture
def racked(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made.start("--racks", ",".join(RACKS.values()))
    finally:
        made.stop()


class Reader:
    """A consumer of partition 0 from its beginning on, and from which node its library says that it fetches."""

    def __init__(self, cluster: Cluster, rack: str) -> None:
        self.values: list[int] = []
        self._stats: dict[str, Any] = {}
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap(cluster),
                "group.id": "reader",
                "client.rack": rack,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "statistics.interval.ms": 100,
                "stats_cb": self._on_stats,
            }
        )
        self._consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])

    def close(self) -> None:
        self._consumer.close()

    def _on_stats(self, text: str) -> None:
        self._stats = json.loads(text)

    def read_until(self, what: str, condition: Any) -> None:
        def holds() -> bool:
            message = self._consumer.poll(0.1)
            if message is not None:
                error = message.error()
                assert error is None or not error.fatal(), error
                if error is None:
                    self.values.append(int(message.value() or b""))
            return bool(condition())

        wait_for(f"{what}; {len(self.values)} read, from node {self.node}", holds)

    def read(self, count: int) -> None:
        """As many as there are, each once and in order."""
        self.read_until(f"{count} records", lambda: len(self.values) >= count)
        assert self.values == list(range(count))

    def refresh(self) -> None:
        """The library's numbers, no older than this call."""
        self._stats = {}
        self.read_until("the library's numbers", lambda: self._stats)

    @property
    def node(self) -> int:
        """Where the library fetches from."""
        topics = self._stats.get("topics", {})
        return int(topics.get(TOPIC, {}).get("partitions", {}).get("0", {}).get("broker", -1))

    def fetches_of(self, node: int) -> int:
        found = [b for b in self._stats["brokers"].values() if b["nodeid"] == node]
        return sum(int(b["req"]["Fetch"]) for b in found)


def _write(cluster: Cluster, step: int) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap(cluster), "enable.idempotence": True})
    for number in range(step * STEP, (step + 1) * STEP):
        producer.produce(TOPIC, b"%d" % number, partition=0)
    assert producer.flush(30) == 0


def _placed(cluster: Cluster) -> tuple[int, int]:
    """A topic's leader, and a follower."""
    cluster.nodes[1].raw.create_topic(TOPIC, 1, replication_factor=3)
    leader = cluster.wait_leader(TOPIC, 0)
    return leader, next(n for n in RACKS if n != leader)


@pytest.mark.full
def test_a_consumer_reads_from_the_follower_in_its_rack_and_from_the_leader_once_that_is_dead(racked: Cluster) -> None:
    leader, follower = _placed(racked)
    _write(racked, 0)
    reader = Reader(racked, RACKS[follower])
    try:
        reader.read(STEP)
        reader.read_until(f"node {follower} is read from", lambda: reader.node == follower)
        steps = _read_from_one_alone(racked, reader, follower, leader)
        racked.kill(follower)
        _write(racked, steps)
        reader.read((steps + 1) * STEP)
        reader.read_until(f"node {leader} is read from", lambda: reader.node == leader)
        racked.restart(follower)
        _write(racked, steps + 1)
        reader.read((steps + 2) * STEP)
    finally:
        reader.close()


def _read_from_one_alone(cluster: Cluster, reader: Reader, follower: int, leader: int) -> int:
    """Writes on, until records have come while the leader was not asked once; how many steps there are then. A slow
    machine may send a reader back for a moment: a follower's disk, or its word from the others, may come late."""
    for step in range(1, 6):
        reader.refresh()
        asked_before = reader.fetches_of(leader)
        _write(cluster, step)
        reader.read((step + 1) * STEP)
        reader.refresh()
        if reader.node == follower and reader.fetches_of(leader) == asked_before:
            return step + 1
    raise AssertionError(f"node {leader} was asked in each of five steps, not node {follower} alone")


def test_a_leader_names_the_replica_in_the_rack_and_a_follower_that_is_cut_off_sends_back(racked: Cluster) -> None:
    leader, follower = _placed(racked)
    at_leader, at_follower = (RawKafka(racked.nodes[n].kafka) for n in (leader, follower))
    try:
        _check_racks_reported(at_leader)
        assert at_leader.produce(TOPIC, batch(b"x", b"y"))["error_code"] == KafkaError.NONE
        rack = RACKS[follower]
        wait_for("the follower holds all and is named", lambda: _named(at_leader, rack=rack, offset=2) == follower)
        named = at_leader.fetch(TOPIC, 1, rack=rack, max_wait_ms=60_000)
        assert (named["error_code"], named["high_watermark"], named["log_start_offset"]) == (KafkaError.NONE, 2, 0)
        assert not named["records"]
        assert _named(at_leader, rack=rack) == follower
        for fields in ({}, {"rack": "nowhere"}, {"rack": RACKS[leader]}, {"version": 10, "rack": rack}):
            answer = at_leader.fetch(TOPIC, 0, **fields)
            assert answer["records"]
            assert answer.get("preferred_read_replica", -1) == -1
        beyond = at_leader.fetch(TOPIC, 99, rack=rack)
        assert beyond["error_code"] == KafkaError.OFFSET_OUT_OF_RANGE
        found = wait_for("the follower's records", lambda: at_follower.fetch(TOPIC, 0, rack=rack)["records"])
        assert found == at_leader.fetch(TOPIC, 0)["records"]
        wait_for(  # one that was held up for a moment may not be sure
            "the follower knows that there is no more",
            lambda: at_follower.fetch(TOPIC, 2, rack=rack)["error_code"] == KafkaError.NONE,
        )
        racked.kill(*(n for n in RACKS if n != follower))
        wait_for(
            "the follower does not know whether there is more",
            lambda: at_follower.fetch(TOPIC, 2, rack=rack)["error_code"] == KafkaError.OFFSET_NOT_AVAILABLE,
        )
        assert at_follower.fetch(TOPIC, 2)["error_code"] == KafkaError.NONE
        assert at_follower.fetch(TOPIC, 0, rack=rack)["records"] == found
    finally:
        at_leader.close()
        at_follower.close()


def _named(raw: RawKafka, *, rack: str, offset: int = 0) -> int:
    return int(raw.fetch(TOPIC, offset, rack=rack)["preferred_read_replica"])


def _check_racks_reported(raw: RawKafka) -> None:
    """Racks in Metadata and DescribeCluster."""
    brokers = raw.call(ApiKey.METADATA, 12, topics=[])["brokers"]
    assert {b["node_id"]: b["rack"] for b in brokers} == RACKS
    brokers = raw.call(ApiKey.DESCRIBE_CLUSTER, 1, endpoint_type=1)["brokers"]
    assert {b["broker_id"]: b["rack"] for b in brokers} == RACKS
