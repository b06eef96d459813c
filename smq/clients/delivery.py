"""Reports the outcome of records to their senders: futures of single records, runs of bulk calls, marks of flushes.

Owns the tokens that travel with a batch. It must never decide anything. `producer` and `publisher` import it; users
import its public names through `smq.clients`.
"""

import asyncio
from typing import NamedTuple

from smq.clients.partition_queue import Batch
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


class BulkDelivery:
    """The outcome of one send_many() call, counted down batch by batch."""

    __slots__ = ("_error", "_left", "_parts", "future")

    def __init__(self, future: "asyncio.Future[list[BatchMetadata]]", count: int) -> None:
        self.future = future
        self._left = count
        self._parts: list[BatchMetadata] = []
        self._error: SmqError | None = None

    def delivered(self, part: BatchMetadata, count: int) -> None:
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
            self.future.set_result(sorted(self._parts, key=lambda p: (p.partition, p.base_offset)))
        else:
            self.future.set_exception(self._error)


def deliver(batch: Batch, base_offset: int, ts_ns: int) -> None:
    """`base_offset` and `ts_ns` are the first record's, -1 if they are not known."""
    topic, partition, is_known = batch.topic, batch.partition, base_offset >= 0
    for first, count, token in batch.tokens:
        if isinstance(token, BulkDelivery):
            start = base_offset + first if is_known else -1
            last = start + count - 1 if is_known else -1
            token.delivered(BatchMetadata(topic, partition, start, last, ts_ns + first if is_known else -1), count)
        elif isinstance(token, asyncio.Future) and not token.done():
            place = (base_offset + first, ts_ns + first) if is_known else (-1, -1)
            token.set_result(RecordMetadata(topic, partition, *place))


def fail(batch: Batch, error: SmqError) -> None:
    for _, count, token in batch.tokens:
        if count == 0 and isinstance(token, asyncio.Future):  # a flush only waits for the end
            if not token.done():
                token.set_result(None)
        else:
            fail_token(token, count, error)


def fail_token(token: object, count: int, error: SmqError) -> None:
    if isinstance(token, BulkDelivery):
        token.failed(error, count)
    elif isinstance(token, asyncio.Future) and not token.done():
        token.set_exception(SmqError(error.code, error.message, error.details))
