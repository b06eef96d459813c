"""The death of nodes under an idempotent Kafka producer: nothing lost, nothing twice, nothing out of order."""

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from smq.testing.cluster import Cluster
from tests.kafka.client_adapters import bootstrap
from tests.kafka.withholding_proxy import WithholdingProxy

TIMEOUT_S = 60.0


class NumberingProducer:
    """An idempotent producer with acks=all that numbers its records, and the offset reported for each."""

    def __init__(self, cluster: Cluster, servers: str, topic: str, partitions: int, **settings: Any) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partitions = partitions
        self.sent = 0
        self.offsets: dict[int, tuple[int, int]] = {}
        self._errors: list[str] = []
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "batch.num.messages": 20,
                "error_cb": lambda error: self._errors.append(str(error)) if error.fatal() else None,
                **settings,
            }
        )

    def send(self, count: int) -> None:
        for number in range(self.sent, self.sent + count):
            partition = number % self._partitions
            self._producer.produce(self._topic, b"%d" % number, partition=partition, on_delivery=self._on_delivery)
            self._producer.poll(0.001)
        self.sent += count

    def _on_delivery(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            self._errors.append(str(error))
        else:
            self.offsets[int(message.value() or b"")] = (message.partition() or 0, message.offset() or 0)

    def finish(self) -> None:
        """Every record is in the log once, in order, at the offset that was reported."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._producer.flush(1) and time.monotonic() < deadline:
            assert not self._errors
        assert not self._errors
        assert len(self.offsets) == self.sent
        for partition in range(self._partitions):
            leader = self._cluster.nodes[self._cluster.wait_leader(self._topic, partition)]
            found = leader.raw.read_all(self._topic, partition)
            values = [int(value) for _, value in sorted(found.items())]
            assert values == list(range(partition, self.sent, self._partitions))
            for number, (place, offset) in self.offsets.items():
                assert place != partition or offset < 0 or found[offset] == b"%d" % number


@pytest.fixture
def proxy(fault_cluster: Cluster) -> Iterator[WithholdingProxy]:
    proxy = WithholdingProxy(fault_cluster)
    yield proxy
    proxy.close()


def test_killed_leaders_cost_an_idempotent_producer_nothing(fault_cluster: Cluster, proxy: WithholdingProxy) -> None:
    """Each leader dies between storing a batch and acknowledging it: the producer sends it to the next one again."""
    topic = fault_cluster.make_topic()
    producer = NumberingProducer(fault_cluster, proxy.bootstrap, topic, 1)
    for _ in range(2):
        producer.send(500)
        proxy.withhold()
        producer.send(500)
        leader = proxy.wait_withheld(TIMEOUT_S)
        fault_cluster.kill(leader)
        proxy.pass_on()
        fault_cluster.restart(leader, wait=False)
        producer.send(500)
        fault_cluster.wait_ready()
    producer.finish()


def test_an_acknowledgement_that_is_lost_costs_an_idempotent_producer_nothing(
    fault_cluster: Cluster, proxy: WithholdingProxy
) -> None:
    """The leader lives, and gets the batch again from the same producer."""
    topic = fault_cluster.make_topic()
    producer = NumberingProducer(fault_cluster, proxy.bootstrap, topic, 1)
    producer.send(100)
    proxy.withhold()
    producer.send(100)
    proxy.wait_withheld(TIMEOUT_S)
    proxy.pass_on()
    producer.finish()


def test_killing_every_node_in_turn_costs_an_idempotent_producer_nothing(fault_cluster: Cluster) -> None:
    producer = NumberingProducer(fault_cluster, bootstrap(fault_cluster), fault_cluster.make_topic(3), 3)
    for node in list(fault_cluster.nodes):
        producer.send(200)
        fault_cluster.kill(node)
        producer.send(200)
        fault_cluster.restart(node)  # ready again before the next is killed: a rolling restart, by SIGKILL
    producer.send(200)
    producer.finish()
