"""Transactional ids that the cluster has forgotten under a producer that lives on: it aborts, and begins again.

That is how librdkafka's producers go on. Java's of Kafka 4.3 end themselves at the first error of that kind.
"""

from collections.abc import Iterator

import confluent_kafka
import pytest

from smq.clients import SyncAdmin
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import fresh
from tests.kafka.transactions.test_clients import await_read, transactional

EXPIRATION = "transactional.id.expiration.ms"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The expiration of ids is the cluster's: other tests must not meet it."""
    with live_cluster(tmp_path_factory.mktemp("forgotten"), 1) as made:
        yield made


def forget(cluster: Cluster, name: str) -> None:
    """Returns once there is no such transactional id any more, and ids are kept again."""
    with SyncAdmin([cluster.nodes[1].grpc]) as admin:

        def ids() -> list[str]:
            return [transaction.transactional_id for transaction in admin.list_transactions()]

        assert name in ids()
        admin.alter_cluster_config(set={EXPIRATION: "1"})
        wait_for("the id is forgotten", lambda: name not in ids(), PATIENCE_S)
        admin.alter_cluster_config(unset=[EXPIRATION])


def test_librdkafkas_producer_goes_on_after_its_id_was_forgotten(alone: Cluster) -> None:
    topic, name = alone.make_topic(), fresh("idle")
    producer = transactional(bootstrap(alone), name)
    producer.begin_transaction()
    producer.produce(topic, b"before", partition=0)
    producer.commit_transaction(PATIENCE_S)
    forget(alone, name)
    producer.begin_transaction()
    producer.produce(topic, b"lost", partition=0)
    with pytest.raises(confluent_kafka.KafkaException) as failed:
        producer.commit_transaction(PATIENCE_S)
    error = failed.value.args[0]
    assert (error.name(), error.txn_requires_abort()) == ("INVALID_PRODUCER_ID_MAPPING", True)
    producer.abort_transaction(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, b"after", partition=0)
    producer.commit_transaction(PATIENCE_S)
    await_read(bootstrap(alone), topic, [b"before", b"after"])
