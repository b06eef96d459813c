"""How the records of one send_many() call are being delivered: counted down, batch by batch.

Owns nothing but the count and the future. Only the producer imports it.
"""

import asyncio
from typing import NamedTuple

from smq.raft_state.errors import SmqError


class BatchMetadata(NamedTuple):
    """Where a run of records lies: offsets `base_offset` to `last_offset`, both inclusive (-1 with acks="none")."""

    topic: str
    partition: int
    base_offset: int
    last_offset: int
    ts_ns: int


class BulkDelivery:
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
        """The call itself raises: whatever was taken in is still delivered, but nobody waits for it."""
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
