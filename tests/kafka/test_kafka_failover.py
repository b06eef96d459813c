"""The death of leaders under an idempotent Kafka producer: nothing lost, nothing twice, nothing out of order."""

import time

import confluent_kafka

from tests.cluster.harness import Cluster
from tests.kafka.faces import bootstrap

RECORDS = 3_000
KILL_AT = (500, 1_800)  # how many records have been handed over when a leader is killed
TIMEOUT_S = 60.0


def test_killed_leaders_cost_an_idempotent_producer_nothing(own_cluster: Cluster) -> None:
    cluster = own_cluster
    cluster.nodes[1].raw.create_topic("t", 1, replication_factor=3)
    cluster.wait_leader("t", 0)
    errors: list[str] = []
    offsets: dict[int, int] = {}

    def on_delivery(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            errors.append(str(error))
        else:
            offsets[int(message.value() or b"")] = message.offset() or 0

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap(cluster),
            "enable.idempotence": True,
            "linger.ms": 2,
            "batch.num.messages": 20,
            "error_cb": lambda error: errors.append(str(error)) if error.fatal() else None,
        }
    )
    for i in range(RECORDS):
        if i in KILL_AT:
            leader = cluster.wait_leader("t", 0)
            cluster.kill(leader)
            cluster.restart(leader, wait=False)
        if i - 1 in KILL_AT:
            cluster.wait_ready()
        producer.produce("t", b"%d" % i, on_delivery=on_delivery)
        producer.poll(0.001)
    deadline = time.monotonic() + TIMEOUT_S
    while producer.flush(1) and time.monotonic() < deadline:
        assert not errors
    assert not errors
    found = cluster.nodes[cluster.wait_leader("t", 0)].raw.read_all("t", 0)
    assert [int(value) for _, value in sorted(found.items())] == list(range(RECORDS))
    told = {value: offset for value, offset in offsets.items() if offset >= 0}
    assert len(offsets) == RECORDS
    assert all(found[offset] == b"%d" % value for value, offset in told.items())
