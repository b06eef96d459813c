"""The partitioner: Kafka's for records with a key, sticky and load-aware for records without one.

Owns the choice of partition and nothing else. Sans-IO; the random source is injected. Only `accumulator` and
`producer` import it.
"""

from typing import Final

from smq.clients.producing.partition_queue import PartitionQueue
from smq.clients.retry import RandomFn
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import key_partition

KEY_CACHE_MAX: Final = 16_384  # keys whose partition is remembered: murmur2 in Python costs more than a record


class TopicQueues:
    """The partitions of one topic. `count` is 0 until the cluster has reported their number."""

    __slots__ = ("_key_cache", "_random", "_sticky", "queues", "topic")

    def __init__(self, topic: str, random: RandomFn) -> None:
        self.topic = topic
        self.queues: list[PartitionQueue] = []
        self._random = random
        self._sticky: PartitionQueue | None = None
        self._key_cache: dict[bytes, PartitionQueue] = {}

    @property
    def count(self) -> int:
        return len(self.queues)

    def grow(self, count: int) -> None:
        """The topic has `count` partitions now. Under one name and id the count never shrinks."""
        if count > len(self.queues):
            self.queues += [PartitionQueue(self.topic, index) for index in range(len(self.queues), count)]
            self._key_cache.clear()

    def explicit(self, partition: int) -> PartitionQueue:
        if not 0 <= partition < len(self.queues):
            message = f"topic {self.topic!r} has partitions 0 to {len(self.queues) - 1}, not {partition}"
            raise SmqError(ErrorCode.UNKNOWN_PARTITION, message)
        return self.queues[partition]

    def for_key(self, given: object) -> PartitionQueue:
        """Kafka's partition of the key (any bytes-like object)."""
        key = given if type(given) is bytes else _as_bytes(given)
        found = self._key_cache.get(key)
        if found is None:
            if len(self._key_cache) >= KEY_CACHE_MAX:
                self._key_cache.clear()
            found = self._key_cache[key] = self.queues[key_partition(key, len(self.queues))]
        return found

    def sticky(self) -> PartitionQueue:
        """The same partition until its open batch is gone, so that batches fill; then the shorter queue of two."""
        current = self._sticky
        if current is None or current.open is None:
            current = self._sticky = min(self._pick(), self._pick(), key=lambda q: len(q.sealed))
        return current

    def _pick(self) -> PartitionQueue:
        return self.queues[int(self._random() * len(self.queues))]


def _as_bytes(key: object) -> bytes:
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise SmqError(ErrorCode.INVALID_REQUEST, f"a key must be bytes or None, not {type(key).__name__}")
