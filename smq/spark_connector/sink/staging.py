"""The rows of one attempt of a task, on their way into one open transaction.

Owns the choice of partition (Kafka's for a row with a key), the batches, their sequences, and their way to the leaders
in rounds. A batch gets its sequence when it is closed, and is sent with it until a majority has it: a leader stores a
repetition once. It must never end the transaction, except to abort it after a failure: the driver decides.
"""

import contextlib
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from smq.clients.errors import error_from_detail
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import key_partition
from smq.records import INT32_MAX, OpenBatch, open_batch
from smq.spark_connector.cluster_calls import Cluster, Retries, as_smq_error
from smq.spark_connector.errors import SinkError
from smq.spark_connector.read_bounds import PartitionKey
from smq.spark_connector.sink import transaction_calls
from smq.spark_connector.sink.columns import Row
from smq.spark_connector.sink.transaction_calls import Producer

BATCH_BYTES: Final = 256 << 10  # a message costs 100 us, whatever its size
ROUND_BYTES: Final = 4 << 20  # closed batches that are sent together: a round waits for its slowest answer
BUFFER_BYTES: Final = 32 << 20  # open batches of all partitions; beyond it, all are closed
IN_FLIGHT_MAX: Final = 5  # a leader remembers a producer's last five batches
KEYS_MAX: Final = 16_384  # whose partition is remembered: murmur2 in Python costs more than a record
ANSWER_TIMEOUT_S: Final = 30.0  # of one round at one node


@dataclass(slots=True, eq=False)
class _Lane:
    """The batches for one partition. `sealed` have sequences, and are not acknowledged yet."""

    key: PartitionKey
    bytes_max: int
    open: OpenBatch | None = None
    count: int = 0
    next_sequence: int = 0
    sealed: deque[bytes] = field(default_factory=deque)
    is_added: bool = False  # to the transaction
    is_primed: bool = False  # the leader knows the producer, so that it refuses a batch that has overtaken another


class Staging:
    def __init__(
        self, cluster: Cluster, transactional_id: str, *, codec: str, transaction_timeout_ms: int, is_temporary: bool
    ) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._codec = codec
        self._timeout_ms = transaction_timeout_ms
        self._is_temporary = is_temporary
        self._lanes: dict[str, list[_Lane]] = {}  # by topic, one for each partition
        self._sticky: dict[str, _Lane] = {}
        self._keys: dict[tuple[str, bytes], _Lane] = {}
        self._leaders: dict[PartitionKey, str] = {}
        self._open_bytes = self._sealed_bytes = 0
        self.producer: Producer | None = None  # None until there is something to write
        self.rows = 0

    # ------------------------------------------------------------------------------------------------- rows in
    def add(self, rows: Iterable[Row], topic: str | None) -> None:
        """Takes rows in, to `topic` or to each row's own. SinkError for a row that cannot be written."""
        now_ms = int(time.time() * 1000)
        for own_topic, partition, key, value, headers, timestamp_ms in rows:
            if self._open_bytes >= BUFFER_BYTES:
                self._seal_all()
            name = topic or own_topic
            if name is None:
                raise SinkError("a row has no topic: its column 'topic' is null")
            lane = self._lane(name, partition, key)
            when = now_ms if timestamp_ms is None else timestamp_ms
            if lane.open is None or not self._append(lane, when, key, value, headers):
                self._seal(lane)
                if self._sealed_bytes >= ROUND_BYTES:
                    self._send()
                lane.open = open_batch(codec=self._codec, bytes_max=lane.bytes_max, is_transactional=True)
                self._append(lane, when, key, value, headers)  # the first record always fits
            self.rows += 1

    def _append(
        self,
        lane: _Lane,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None,
    ) -> bool:
        assert lane.open is not None
        before = lane.open.size()
        if lane.open.append(lane.count, timestamp_ms, key, value, list(headers or ())) is None:
            return False
        lane.count += 1
        self._open_bytes += lane.open.size() - before
        return True

    def _lane(self, topic: str, partition: int | None, key: bytes | None) -> _Lane:
        lanes = self._lanes.get(topic)
        if lanes is None:
            lanes = self._learn(topic)
        if partition is not None:
            if not 0 <= partition < len(lanes):
                raise SinkError(f"a row names partition {partition}: {topic!r} has partitions 0 to {len(lanes) - 1}")
            return lanes[partition]
        if key is not None:
            found = self._keys.get((topic, key))
            if found is None:
                if len(self._keys) >= KEYS_MAX:
                    self._keys.clear()
                found = self._keys[topic, key] = lanes[key_partition(key, len(lanes))]
            return found
        current = self._sticky.get(topic)
        if current is None or current.open is None:
            current = self._sticky[topic] = random.choice(lanes)
        return current

    def _learn(self, topic: str) -> list[_Lane]:
        """The partitions of a topic, as they stay for this task: later ones are for the next."""
        found = self._cluster.topic_places(topic)
        bytes_max = min(BATCH_BYTES, found.batch_bytes_max)
        self._leaders |= {(topic, partition): leader for partition, leader in found.leaders.items()}
        lanes = self._lanes[topic] = [_Lane((topic, partition), bytes_max) for partition in range(found.count)]
        return lanes

    # ---------------------------------------------------------------------------------------------- batches out
    def finish(self) -> None:
        """Returns once a majority has every row."""
        self._seal_all()
        self._send()

    def _all_lanes(self) -> Iterator[_Lane]:
        return (lane for lanes in self._lanes.values() for lane in lanes)

    def _seal_all(self) -> None:
        for lane in self._all_lanes():
            self._seal(lane)

    def _seal(self, lane: _Lane) -> None:
        if lane.open is None:
            return
        if self.producer is None:
            self.producer = transaction_calls.start(
                self._cluster, self._id, self._timeout_ms, is_temporary=self._is_temporary
            )
        self._open_bytes -= lane.open.size()
        lane.open.set_producer_state(self.producer.producer_id, self.producer.producer_epoch, lane.next_sequence)
        lane.next_sequence = (lane.next_sequence + lane.count) & INT32_MAX
        lane.sealed.append(bytes(lane.open.build()))
        self._sealed_bytes += len(lane.sealed[-1])
        lane.open, lane.count = None, 0

    def _send(self) -> None:
        """Sends every closed batch, again until it is acknowledged. SmqError if a retry cannot help, SinkError if the
        retry timeout is over without progress."""
        due = [lane for lane in self._all_lanes() if lane.sealed]
        if new := [lane for lane in due if not lane.is_added]:
            assert self.producer is not None
            transaction_calls.add_partitions(self._cluster, self.producer, [lane.key for lane in new])
            for lane in new:
                lane.is_added = True
        retries = Retries(self._cluster.retry_timeout_s, SinkError)
        while due := [lane for lane in due if lane.sealed]:
            before = sum(len(lane.sealed) for lane in due)
            self._send_round(due, retries)
            if sum(len(lane.sealed) for lane in due) < before:
                retries.reset()
            else:
                retries.pause("the leaders did not take the rows of a task")
                self._find_leaders({lane.key[0] for lane in due if lane.sealed})
        self._sealed_bytes = 0

    def _send_round(self, due: list[_Lane], retries: Retries) -> None:
        """The next batches of each partition, to all leaders at the same time."""
        by_address: dict[str, list[_Lane]] = {}
        for lane in due:
            if (address := self._leaders.get(lane.key)) is not None:
                by_address.setdefault(address, []).append(lane)
        calls = []
        for address, lanes in by_address.items():
            sent = [(lane, lane.sealed[i]) for lane in lanes for i in range(_window(lane))]
            requests = [_request(number, lane, batch) for number, (lane, batch) in enumerate(sent)]
            stream = self._cluster.agent(address).PublishRecord(iter(requests), timeout=ANSWER_TIMEOUT_S)
            calls.append((address, [lane for lane, _ in sent], stream))
        for address, lanes, stream in calls:
            self._take_answers(address, lanes, stream, retries)

    def _take_answers(
        self, address: str, lanes: list[_Lane], stream: Iterable[pb.PublishRecordResponse], retries: Retries
    ) -> None:
        errors: dict[int, SmqError] = {}
        answered: set[int] = set()
        try:
            for answer in stream:
                answered.add(answer.correlation_id)
                if answer.HasField("error"):
                    errors[answer.correlation_id] = error_from_detail(answer.error)
        except grpc.RpcError as e:
            error = as_smq_error(e, address)
            retries.record(address, _retriable(error))
            self._cluster.failed(address)
        for number, lane in enumerate(lanes):  # in the order of the batches of each partition
            if number in answered and number not in errors:
                lane.sealed.popleft()
                lane.is_primed = True
        for number, error in errors.items():
            retries.record(address, _retriable(error))
            if error.details.leader_address:
                self._leaders[lanes[number].key] = error.details.leader_address

    def _find_leaders(self, topics: set[str]) -> None:
        for topic in topics:
            found = self._cluster.topic_places(topic)
            self._leaders |= {(topic, partition): leader for partition, leader in found.leaders.items()}

    # -------------------------------------------------------------------------------------------------- failure
    def abort(self) -> None:
        """The attempt has failed. If the cluster does not answer, the transaction's time-out does it."""
        if self.producer is not None:
            abort_quietly(self._cluster, self.producer)


ABORT_TIMEOUT_S: Final = 5.0  # without an abort, readers wait until the transaction's time-out


def abort_quietly(cluster: Cluster, producer: Producer) -> None:
    with contextlib.suppress(SmqError, SinkError):  # it was fenced or has ended, or the cluster does not answer
        transaction_calls.abort(cluster, producer, ABORT_TIMEOUT_S)


def abort_of_dead_quietly(cluster: Cluster, transactional_id: str) -> None:
    """What a producer has staged that died without a word."""
    with contextlib.suppress(SmqError, SinkError):
        transaction_calls.abort_of_dead(cluster, transactional_id, ABORT_TIMEOUT_S)


def _window(lane: _Lane) -> int:
    """A leader that does not know a producer takes any first sequence: until it does, one batch is under way."""
    return min(len(lane.sealed), IN_FLIGHT_MAX) if lane.is_primed else 1


def _request(number: int, lane: _Lane, batch: bytes) -> pb.PublishRecordRequest:
    topic, partition = lane.key
    return pb.PublishRecordRequest(
        correlation_id=number,
        topic=topic,
        partition=partition,
        acks=pb.ACKS_ALL,
        batch=batch,
        timeout_ms=int(ANSWER_TIMEOUT_S * 900),
    )


# Refusals that a leader which lags behind may give to a valid batch.
_PASSING: Final = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION})


def _retriable(error: SmqError) -> SmqError:
    """Returns the error if a retry may help; raises it otherwise."""
    if not error.code.is_retriable and error.code not in _PASSING:
        raise error
    return error
