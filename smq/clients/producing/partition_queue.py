"""One partition's queue of batches to send: their order, their sequences, and the window in flight.

Owns the rules that keep an idempotent producer's records in order and stored once. Sans-IO: it must never send,
sleep or read a clock. Only `accumulator` and `partitioner` import it (and the producer, for the types).

The reasons for the rules:
- A batch gets its sequence when it is first sent, never before. So a batch that is never sent leaves no gap.
- A leader that does not know a producer id accepts any first sequence (as in Kafka). So only one batch is in flight
  until the first acknowledgement under an id. Otherwise a later batch could overtake a refused first one for good.
- After a failure the queue is recovering: it waits until nothing is in flight and resends one batch at a time. Every
  batch in flight after the failed one has failed with it, and is resent in the same order.
- A batch given up after it got a sequence leaves a gap that the log would refuse for ever. Later batches continue under
  a new producer id: restamped if they certainly were not stored, reported if that is unknown.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import INT32_MAX, Headers, OpenBatch, open_batch, restamped

NO_SEQUENCE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdentity:
    producer_id: int
    producer_epoch: int


NOT_IDEMPOTENT: Final = ProducerIdentity(producer_id=-1, producer_epoch=-1)


class Batch:
    """Records of one partition. `tokens` are (first index in the batch, count, the sender's own object)."""

    __slots__ = (
        "attempts",
        "bytes_counted",
        "count",
        "created_ms",
        "data",
        "identity",
        "in_flight",
        "is_done",
        "is_due",
        "last_error",
        "open",
        "outcome_unknown",
        "queue",
        "refusals",
        "sequence",
        "tokens",
    )

    def __init__(self, queue: "PartitionQueue", open_batch: OpenBatch, created_ms: float) -> None:
        self.queue = queue
        self.open: OpenBatch | None = open_batch
        self.created_ms = created_ms
        self.count = 0
        self.bytes_counted = 0
        self.tokens: list[tuple[int, int, object]] = []
        self.data = b""
        self.identity = NOT_IDEMPOTENT
        self.sequence = NO_SEQUENCE
        self.attempts = 0
        self.refusals = 0
        self.in_flight = False
        self.is_due = False
        self.is_done = False
        self.outcome_unknown = False
        self.last_error: SmqError | None = None

    @property
    def topic(self) -> str:
        return self.queue.topic

    @property
    def partition(self) -> int:
        return self.queue.partition

    def stamp(self, identity: ProducerIdentity, sequence: int) -> None:
        """Fixes the bytes under this identity and sequence. Every retry sends exactly these."""
        self.identity, self.sequence = identity, sequence
        if self.open is not None:
            self.open.set_producer_state(identity.producer_id, identity.producer_epoch, sequence)
            self.data = bytes(self.open.build())
            self.open = None
        else:
            self.data = restamped(
                self.data,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                base_sequence=sequence,
            )

    def final_error(self, error: SmqError) -> SmqError:
        """The error for the sender: never a definite one if an earlier attempt may have been stored."""
        if not self.outcome_unknown or not error.code.is_definite:
            return error
        message = f"the outcome of {self.in_words} is unknown; the last answer was {error}"
        return SmqError(ErrorCode.TIMED_OUT, message, error.details)

    @property
    def in_words(self) -> str:
        """For an error message."""
        return f"{self.count} record{'' if self.count == 1 else 's'} for {self.topic}/{self.partition}"


class PartitionQueue:
    """The open batch and the sealed ones, oldest first. Batches in flight are at the front unless recovering."""

    __slots__ = (
        "identity",
        "in_flight",
        "needs_own_identity",
        "next_sequence",
        "open",
        "partition",
        "primed",
        "recovering",
        "reset_pending",
        "retry_at_ms",
        "sealed",
        "stamped_as",
        "topic",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.sealed: deque[Batch] = deque()  # bounded by the accumulator's buffer_bytes_max
        self.in_flight = 0
        self.identity: ProducerIdentity | None = None
        self.stamped_as: ProducerIdentity | None = None  # the latest one that it has had: `next_sequence` is its
        self.needs_own_identity = False  # this partition has abandoned the producer's shared identity
        self.next_sequence = 0
        self.primed = False  # a batch under this identity has been acknowledged
        self.recovering = False
        self.reset_pending = False
        self.retry_at_ms = 0.0

    @property
    def is_empty(self) -> bool:
        return self.open is None and not self.sealed

    def batches(self) -> list[Batch]:
        return [*self.sealed, self.open] if self.open is not None else list(self.sealed)

    def seal(self) -> None:
        if self.open is not None:
            self.sealed.append(self.open)
            self.open = None

    def take_identity(self, identity: ProducerIdentity) -> None:
        """Its sequences begin with 0, unless it had this one before, in the producer's last transaction."""
        if identity != self.stamped_as:
            self.next_sequence, self.primed = 0, False
        self.identity = self.stamped_as = identity

    def end_transaction(self) -> None:
        """Nothing is left to send. The next batch waits until the partition is part of the next transaction."""
        self.identity, self.recovering, self.retry_at_ms = None, False, 0.0

    def window(self, in_flight_max: int) -> int:
        """How many batches may be in flight now."""
        if self.recovering and (not self.sealed or self.sealed[0].attempts == 0):
            self.recovering = False  # every batch sent before the failure is settled
        return 1 if self.recovering or not self.primed else in_flight_max

    def candidate(self, now_ms: float, linger_ms: float) -> Batch | None:
        """The next batch in order; seals the open one if it is due. None if there is nothing to send."""
        if len(self.sealed) > self.in_flight:
            return self.sealed[self.in_flight]
        batch = self.open
        if batch is None or not (batch.is_due or now_ms >= batch.created_ms + linger_ms):
            return None
        self.seal()
        return batch

    def sent(self, batch: Batch) -> None:
        """Called when `batch` is handed out, with `identity` set; stamps it the first time."""
        identity = self.identity or NOT_IDEMPOTENT
        if identity is NOT_IDEMPOTENT:
            if batch.open is not None:
                batch.stamp(identity, NO_SEQUENCE)
        elif batch.sequence == NO_SEQUENCE:
            batch.stamp(identity, self.next_sequence)
            self.next_sequence = (self.next_sequence + batch.count) & INT32_MAX
        batch.attempts += 1
        batch.in_flight = True
        self.in_flight += 1

    def answered(self, batch: Batch) -> None:
        batch.in_flight = False
        self.in_flight -= 1

    def remove(self, batch: Batch) -> None:
        batch.is_done = True
        if batch is self.open:
            self.open = None
        elif self.sealed and self.sealed[0] is batch:
            self.sealed.popleft()
        else:
            self.sealed.remove(batch)
        if batch.in_flight:
            self.answered(batch)

    def reset(self) -> list[Batch]:
        """Abandons the identity. Batches that were not stored lose their stamp and are resent. Returns the batches
        whose outcome is unknown."""
        self.reset_pending = False
        self.identity = None
        self.needs_own_identity = True
        uncertain = [b for b in self.sealed if b.sequence != NO_SEQUENCE and b.outcome_unknown]
        for batch in self.sealed:
            batch.sequence = NO_SEQUENCE
        return uncertain


def append_to(batch: Batch, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Encodes one record into an open batch. Returns its size in bytes, or 0 if it does not fit.

    INVALID_REQUEST if the record cannot be encoded; the batch is unchanged.
    """
    encoder = batch.open
    if encoder is None:
        return 0
    before = encoder.size()
    if not _is_appended(encoder, batch.count, timestamp_ms, key, value, headers):
        return 0
    batch.count += 1
    return encoder.size() - before


def check_record(timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    """INVALID_REQUEST if the record cannot be encoded."""
    _is_appended(open_batch(codec="none", bytes_max=0), 0, timestamp_ms, key, value, headers)


def _is_appended(
    encoder: OpenBatch, index: int, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers
) -> bool:
    """False if it does not fit. INVALID_REQUEST if the record cannot be encoded."""
    try:
        added = encoder.append(index, timestamp_ms, key, value, headers if type(headers) is list else list(headers))
    except (TypeError, OverflowError, AttributeError, ValueError) as e:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"the record cannot be encoded: {_reason(e, key, value)}") from e
    return added is not None


def _reason(failure: Exception, key: object, value: object) -> str:
    for name, given in (("key", key), ("value", value)):
        if given is not None and not isinstance(given, bytes | bytearray | memoryview):
            return f"its {name} must be bytes or None, not {type(given).__name__}"
    return f"headers are (str, bytes or None) pairs and the timestamp an integer of milliseconds ({failure})"
