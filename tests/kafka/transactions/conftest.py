"""A transactional producer by raw requests."""

from collections.abc import Callable

import pytest

from smq.testing.kafka_client import RawKafka
from tests.kafka.transactions.raw import Tx, fresh, init

Connect = Callable[[str], RawKafka]


@pytest.fixture
def tx(owner: Connect, leader: Connect, new_topic: Callable[..., str]) -> Tx:
    """In epoch 0, with a topic of one partition."""
    topic, name = new_topic(), fresh("tx")
    raw = owner(name)
    return Tx(name, topic, raw, leader(topic), init(raw, name)["producer_id"])
