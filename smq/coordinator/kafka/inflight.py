"""What all Kafka connections of a node hold together.

Owns what counts, and how long a fetch waits on a full node. These count: requests that have begun to arrive, answers
that are being read from the log, and answers that their clients have not taken yet. A fetch that waits for records
holds nothing and costs nothing. On a full node no connection is read, except in the middle of a request, and no answer
is read from the log: after a while a fetch gets an empty answer, which ends its wait and that of the answers behind it.
Answers that are being read hold no more than a share, however slow the disk is: they alone never make the node full.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from smq.coordinator.limits import (
    KAFKA_BUDGET_WAIT_S_MAX,
    KAFKA_INFLIGHT_BYTES_PER_NODE_MAX,
    KAFKA_READING_BYTES_PER_NODE_MAX,
)
from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, overloaded, release_all, try_acquire_all


class InflightBytes(ByteBudget):
    """The last request or answer may exceed the bound, because otherwise nothing that large could ever be served."""

    def __init__(self, bytes_max: int = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX) -> None:
        super().__init__(bytes_max, may_overshoot=True)
        reading = ByteBudget(KAFKA_READING_BYTES_PER_NODE_MAX, may_overshoot=True)
        self._for_reading = (reading, self)  # the share first: waiting for it takes no room from others

    def add(self, size: int) -> None:
        """Negative to give back."""
        if size < 0:
            self.release(-size)
        else:
            self.take(size)

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Reserves `size` bytes for the length of a block, as soon as neither the node nor its share for
        reading is full. OVERLOADED if that takes too long: the disk may be slow, or the bytes may be held by answers
        that wait, on their own connection, behind this very one."""
        if not try_acquire_all(self._for_reading, size):
            try:
                async with asyncio.timeout(KAFKA_BUDGET_WAIT_S_MAX):  # a timer, but only then
                    await acquire_all(self._for_reading, size)
            except TimeoutError:
                raise overloaded(f"no room for an answer within {KAFKA_BUDGET_WAIT_S_MAX} s") from None
        try:
            yield
        finally:
            release_all(self._for_reading, size)
