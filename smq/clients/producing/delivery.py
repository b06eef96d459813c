"""Reports the outcome of records to their senders: futures of single records, runs of bulk calls, marks of flushes.

Owns the tokens that travel with a batch. It must never decide anything. `producer` and `publisher` import it; users
import its public names through `smq.clients`.
"""

import asyncio
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, TypeAlias

from smq.clients.arguments import seconds
from smq.clients.forked import check_owner
from smq.clients.producing.partition_queue import Batch
from smq.raft_state.errors import SmqError


class RecordMetadata(NamedTuple):
    """Where a record is stored. `offset` and `ts_ns` are -1 with acks="none"."""

    topic: str
    partition: int
    offset: int
    ts_ns: int


class BatchMetadata(NamedTuple):
    """Where a run of records is stored: offsets `base_offset` to `last_offset`, inclusive (-1 with acks="none").
    `ts_ns` is that of `base_offset`, and each further record's is one more."""

    topic: str
    partition: int
    base_offset: int
    last_offset: int
    ts_ns: int


OutcomeFn: TypeAlias = Callable[[RecordMetadata, SmqError | None], None]


class Settled:
    """Wakes the threads that wait for Deliveries of one producer. One for all: a lock per record would cost more than
    the record."""

    __slots__ = ("condition", "pid", "waiting")

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting = 0
        self.pid = os.getpid()

    def check_owner(self) -> None:
        """FORKED in a child process: nothing would ever wake it there."""
        check_owner(self.pid)

    def wake(self) -> None:
        """Called after the outcome is set. A thread that begins to wait sees the outcome, or is counted by now."""
        if self.waiting:
            with self.condition:
                self.condition.notify_all()


class Delivery:
    """The outcome of one record of the blocking producer, as a future of the standard library gives it."""

    __slots__ = ("_callbacks", "_outcome", "_settled")

    def __init__(self, settled: Settled) -> None:
        self._settled = settled
        self._outcome: RecordMetadata | SmqError | None = None
        self._callbacks: list[Callable[[Delivery], object]] | None = None

    def done(self) -> bool:
        """Whether the record is acknowledged or has failed."""
        return self._outcome is not None

    def result(self, timeout: float | timedelta | None = None) -> RecordMetadata:
        """Waits for the acknowledgement, at most `timeout` seconds. TimeoutError, or the SmqError that ended the
        record, such as UNKNOWN_TOPIC; INVALID_REQUEST for a `timeout` that is no time; FORKED in a child process."""
        outcome = self._wait(timeout)
        if isinstance(outcome, SmqError):
            raise SmqError(outcome.code, outcome.message, outcome.details)
        return outcome

    def exception(self, timeout: float | timedelta | None = None) -> SmqError | None:
        """As `result`, with `timeout` in seconds, but returns the error; None after a success. TimeoutError; FORKED in
        a child process."""
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, SmqError) else None

    def add_done_callback(self, callback: "Callable[[Delivery], object]") -> None:
        """Calls `callback(self)` once, when the record is settled: in the thread of the clients' event loop, which it
        must not block; immediately if the record is settled."""
        with self._settled.condition:
            self._callbacks = [*(self._callbacks or ()), callback]
        # The loop looks for callbacks after it has set the outcome: so it sees this callback, or we the outcome.
        if self._outcome is not None:
            self._call_back()

    def _wait(self, timeout: float | timedelta | None) -> RecordMetadata | SmqError:
        settled, timeout_s = self._settled, seconds("timeout", timeout)
        if self._outcome is None:
            settled.check_owner()
            with settled.condition:
                settled.waiting += 1
                try:
                    settled.condition.wait_for(self.done, timeout_s)
                finally:
                    settled.waiting -= 1
        if self._outcome is None:
            raise TimeoutError(f"the record was not acknowledged within {timeout} s; it may still be")
        return self._outcome

    # -- on the loop

    def settle(self, outcome: RecordMetadata | SmqError) -> None:
        """`wake` must follow: once for all records of a batch."""
        self._outcome = outcome
        if self._callbacks is not None:
            self._call_back()

    def wake(self) -> None:
        """Wakes the threads that wait."""
        self._settled.wake()

    def fail(self, error: SmqError) -> None:
        """Settles it with an error, and wakes."""
        self.settle(error)
        self.wake()

    def _call_back(self) -> None:
        with self._settled.condition:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the next callback is of another caller
                logging.getLogger(__name__).exception("a callback of a delivery failed")


class Intercepted:
    """The sender's token of a record that interceptors have seen: they learn its outcome before the sender does."""

    __slots__ = ("_partition", "_told", "_topic", "token")

    def __init__(self, token: object, topic: str, partition: int | None, told: OutcomeFn) -> None:
        self.token = token
        self._topic = topic
        self._partition = -1 if partition is None else partition
        self._told = told

    def delivered(self, place: RecordMetadata) -> None:
        self._told(place, None)

    def failed(self, error: SmqError) -> None:
        self._told(RecordMetadata(self._topic, self._partition, -1, -1), error)


class BulkDelivery:
    """The outcome of one send_many() call, counted down batch by batch. `transaction`: the number of the one that it is
    part of."""

    __slots__ = ("_error", "_left", "_parts", "future", "transaction")

    def __init__(
        self, future: "asyncio.Future[list[BatchMetadata]]", count: int, transaction: int | None = None
    ) -> None:
        self.future = future
        self.transaction = transaction
        self._left = count
        self._parts: list[BatchMetadata] = []
        self._error: SmqError | None = None

    def delivered(self, part: BatchMetadata, count: int) -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and _follows(last, part):  # records that were intercepted come one by one
            self._parts[-1] = last._replace(last_offset=part.last_offset)
        else:
            self._parts.append(part)
        self._settle(count)

    def failed(self, error: SmqError, count: int) -> None:
        self._error = self._error or error
        self._settle(count)

    def refused(self, error: SmqError) -> None:
        """The call itself raises: records already buffered are still delivered, but no caller waits for them."""
        self._error = error
        self.future.cancel()

    def _settle(self, count: int) -> None:
        self._left -= count
        if self._left or self.future.done():
            return
        if self._error is None:
            self.future.set_result(sorted(self._parts, key=lambda p: (p.topic, p.partition, p.base_offset)))
        else:
            self.future.set_exception(self._error)


class FlushMark:
    """What one flush() waits for: `ended` is set once everything that carries the mark is settled. If the flush is
    cancelled, so is `ended`."""

    __slots__ = ("_left", "ended")

    def __init__(self, ended: "asyncio.Future[None]", count: int) -> None:
        self.ended = ended
        self._left = count

    def settle(self) -> None:
        """Called once by each that carries it."""
        self._left -= 1
        if not self._left and not self.ended.done():
            self.ended.set_result(None)


def is_over(token: object) -> bool:
    """Whether it is the mark of a flush that waits no more."""
    return isinstance(token, FlushMark) and token.ended.done()


def _follows(last: BatchMetadata, part: BatchMetadata) -> bool:
    """Whether both are one run: adjacent records of one partition, with adjacent append times."""
    place = (last.topic, last.partition, last.last_offset + 1, last.ts_ns + last.last_offset + 1 - last.base_offset)
    return place == (part.topic, part.partition, part.base_offset, part.ts_ns) and part.base_offset > 0


def deliver(batch: Batch, base_offset: int, ts_ns: int) -> None:
    """`base_offset` and `ts_ns` are the first record's, -1 if they are not known."""
    _deliver(batch.tokens, batch, base_offset, ts_ns)


def _deliver(tokens: list[tuple[int, int, object]], batch: Batch, base_offset: int, ts_ns: int) -> None:
    topic, partition, is_known, waiting = batch.topic, batch.partition, base_offset >= 0, None
    for first, count, token in tokens:
        if isinstance(token, BulkDelivery):
            start = base_offset + first if is_known else -1
            last = start + count - 1 if is_known else -1
            token.delivered(BatchMetadata(topic, partition, start, last, ts_ns + first if is_known else -1), count)
        elif isinstance(token, Delivery):
            place = (base_offset + first, ts_ns + first) if is_known else (-1, -1)
            token.settle(RecordMetadata(topic, partition, *place))
            waiting = token
        elif isinstance(token, asyncio.Future) and not token.done():
            place = (base_offset + first, ts_ns + first) if is_known else (-1, -1)
            token.set_result(RecordMetadata(topic, partition, *place))
        elif isinstance(token, Intercepted):
            place = (base_offset + first, ts_ns + first) if is_known else (-1, -1)
            token.delivered(RecordMetadata(topic, partition, *place))
            _deliver([(first, count, token.token)], batch, base_offset, ts_ns)
        elif isinstance(token, FlushMark):
            token.settle()
    if waiting is not None:
        waiting.wake()


def fail(batch: Batch, error: SmqError) -> None:
    for first, count, token in batch.tokens:
        if count == 0:
            end_mark(token)
        else:
            fail_token(token, count, _error_of(error, first, count))


def _error_of(error: SmqError, first: int, count: int) -> SmqError:
    """What the sender of these records of the batch learns, if the node has named the bad ones of a refused batch."""
    bad = error.details.records
    if not bad:
        return error
    at = bisect_left(bad, first, key=lambda record: record.place)
    if at == len(bad) or bad[at].place >= first + count:
        message = f"another record of its batch was refused, so send it again ({error.message})"
    else:
        message = bad[at].message if count == 1 else error.message
    return SmqError(error.code, message, replace(error.details, records=()))  # places in a batch mean nothing to it


def end_mark(mark: object) -> None:
    """A flush only waits for the end."""
    if isinstance(mark, FlushMark):
        mark.settle()


def fail_token(token: object, count: int, error: SmqError) -> None:
    if isinstance(token, Intercepted):
        token.failed(error)
        fail_token(token.token, count, error)
    elif isinstance(token, BulkDelivery):
        token.failed(error, count)
    elif isinstance(token, Delivery):
        token.fail(error)
    elif isinstance(token, asyncio.Future) and not token.done():
        token.set_exception(SmqError(error.code, error.message, error.details))
