"""librdkafka as a client beyond its quota: it hears how long to wait, waits, and loses nothing."""

from collections.abc import Callable

import confluent_kafka

from smq.clients import SyncAdmin
from smq.clients.types import Quota
from smq.testing.cluster import Cluster

RECORDS = 150
RATE = 10_000  # bytes per second, of which ten seconds are there from the beginning


def test_a_throttled_producer_hears_of_it_and_delivers_all(
    cluster: Cluster, bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic, waits, delivered = new_topic(), list[float](), list[object]()
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        admin.alter_quotas([Quota(key="producer_byte_rate", value=RATE, client_id="greedy")])
        config = {"bootstrap.servers": bootstrap, "client.id": "greedy", "linger.ms": 0, "batch.size": 2_000}
        producer = confluent_kafka.Producer(config | {"throttle_cb": lambda event: waits.append(event.throttle_time)})
        for number in range(RECORDS):
            producer.produce(topic, b"%d" % number * 300, on_delivery=lambda error, _: delivered.append(error))
        assert producer.flush(30) == 0
        admin.alter_quotas([Quota(key="producer_byte_rate", value=0, client_id="greedy")])
    assert delivered == [None] * RECORDS
    assert any(wait > 0 for wait in waits)
