"""The requests of a transactional producer, one by one, over a raw connection to the coordinator of its id.

Owns no judgement: the tests look at the codes.
"""

import uuid
from typing import Any

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import wait_for
from tests.kafka.reading import PATIENCE_S


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
