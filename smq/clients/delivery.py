"""Telling senders what became of their records: futures of single records, runs of bulk calls, marks of flushes.

Owns the tokens that travel with a batch. It decides nothing. `producer` and `publisher` import it.
"""

import asyncio
from typing import NamedTuple

from smq.clients.batch_queue import Batch
from smq.clients.bulk import BatchMetadata, BulkDelivery
from smq.raft_state.errors import SmqError


class RecordMetadata(NamedTuple):
    """Where a record lies. `offset` and `ts_ns` are -1 with acks="none"."""

    topic: str
    partition: int
    offset: int
    ts_ns: int


def deliver(batch: Batch, base_offset: int, ts_ns: int) -> None:
    topic, partition = batch.topic, batch.partition
    for first, count, token in batch.tokens:
        if isinstance(token, BulkDelivery):
            start = base_offset + first if base_offset >= 0 else -1
            last = start + count - 1 if base_offset >= 0 else -1
            token.delivered(BatchMetadata(topic, partition, start, last, ts_ns), count)
        elif isinstance(token, asyncio.Future) and not token.done():
            token.set_result(RecordMetadata(topic, partition, base_offset + first if base_offset >= 0 else -1, ts_ns))


def fail(batch: Batch, error: SmqError) -> None:
    for _, count, token in batch.tokens:
        if count == 0 and isinstance(token, asyncio.Future):  # a flush only wants to know that it is over
            if not token.done():
                token.set_result(None)
        else:
            fail_token(token, count, error)


def fail_token(token: object, count: int, error: SmqError) -> None:
    if isinstance(token, BulkDelivery):
        token.failed(error, count)
    elif isinstance(token, asyncio.Future) and not token.done():
        token.set_exception(SmqError(error.code, error.message, error.details))
