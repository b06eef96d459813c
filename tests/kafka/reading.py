"""Everything that a topic holds, as a consumer gets it: every message up to the end of each partition."""

import time
import uuid
from collections.abc import Sequence

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message, TopicPartition

PATIENCE_S = 60.0


def messages(
    servers: str,
    topic: str,
    *,
    partitions: int = 1,
    isolation: str = "read_committed",
    starts: Sequence[int] | None = None,
) -> list[list[Message]]:
    """A list for each partition, from its beginning or from its offset in `starts`."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"reader-{uuid.uuid4().hex[:8]}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, p, starts[p] if starts else OFFSET_BEGINNING) for p in range(partitions)])
    found: list[list[Message]] = [[] for _ in range(partitions)]
    ended: set[int] = set()
    until = time.monotonic() + PATIENCE_S
    try:
        while len(ended) < partitions:
            assert time.monotonic() < until, "the end was never reached"
            for message in consumer.consume(1_000, 0.1):
                place, error = message.partition() or 0, message.error()
                if error is None:
                    ended.discard(place)
                    found[place].append(message)
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ended.add(place)
    finally:
        consumer.close()
    return found
