"""The requests of a transactional producer, one by one, over raw connections.

Owns no judgement: the tests look at the codes.
"""

import uuid
from dataclasses import dataclass
from typing import Any

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import wait_for
from tests.kafka.reading import PATIENCE_S

JOINING, BUMPING = 12, 5  # the versions of Produce and EndTxn of Kafka's second protocol of transactions


def fresh(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def init(raw: RawKafka, name: str, version: int = 4, **fields: Any) -> dict[str, Any]:
    fields = {"transaction_timeout_ms": 60_000, "producer_id": -1, "producer_epoch": -1} | fields
    answer: dict[str, Any] = {}

    def is_answered() -> bool:
        nonlocal answer
        answer = raw.call(ApiKey.INIT_PRODUCER_ID, version, transactional_id=name, **fields)
        return bool(answer["error_code"] != KafkaError.CONCURRENT_TRANSACTIONS)

    wait_for("the markers are written", is_answered, PATIENCE_S)
    return answer


def add(raw: RawKafka, name: str, producer: int, epoch: int, topic: str, version: int = 3) -> int:
    body = raw.call(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        version,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )
    code: int = body["results_by_topic_v3_and_below"][0]["results_by_partition"][0]["partition_error_code"]
    return code


def end(raw: RawKafka, name: str, producer: int, epoch: int, *, commit: bool, version: int = 3) -> int:
    body = raw.call(
        ApiKey.END_TXN, version, transactional_id=name, producer_id=producer, producer_epoch=epoch, committed=commit
    )
    code: int = body["error_code"]
    return code


def finish(raw: RawKafka, name: str, producer: int, epoch: int, *, commit: bool = True) -> tuple[int, int, int]:
    """EndTxn 5: the code, and with what the producer goes on."""
    body = raw.call(
        ApiKey.END_TXN, BUMPING, transactional_id=name, producer_id=producer, producer_epoch=epoch, committed=commit
    )
    return body["error_code"], body["producer_id"], body["producer_epoch"]


def data(producer: int, epoch: int, sequence: int = 0) -> bytes:
    return batch(b"v", producer_id=producer, producer_epoch=epoch, base_sequence=sequence, is_transactional=True)


def write(
    raw: RawKafka, name: str, topic: str, producer: int, epoch: int, sequence: int = 0, *, version: int = JOINING
) -> dict[str, Any]:
    return raw.produce(topic, data(producer, epoch, sequence), version=version, transactional_id=name)


def committed(raw: RawKafka, topic: str) -> int:
    """The last stable offset."""
    return int(raw.fetch(topic, 0)["last_stable_offset"])


@dataclass(frozen=True)
class Tx:
    """A producer `id` of a transactional id, with connections to its coordinator and to the leader of its topic."""

    name: str
    topic: str
    raw: RawKafka
    leader: RawKafka
    id: int

    def add(self, epoch: int, version: int = 3) -> int:
        return add(self.raw, self.name, self.id, epoch, self.topic, version)

    def end(self, epoch: int, *, commit: bool, version: int = 3) -> int:
        return end(self.raw, self.name, self.id, epoch, commit=commit, version=version)

    def finish(self, epoch: int, *, commit: bool = True) -> tuple[int, int, int]:
        return finish(self.raw, self.name, self.id, epoch, commit=commit)

    def write(self, epoch: int, sequence: int = 0, *, version: int = JOINING) -> int:
        answer = write(self.leader, self.name, self.topic, self.id, epoch, sequence, version=version)
        code: int = answer["error_code"]
        return code

    def committed(self) -> int:
        return committed(self.leader, self.topic)
