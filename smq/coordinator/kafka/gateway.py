"""What every handler of a Kafka request gets: node, groups, the settings of the listener, and the bytes in flight.

Owns what all Kafka connections of a node hold together, and how long a fetch waits on a full node. These count:
requests that have begun to arrive, answers that are being read from the log, and answers that their clients have not
taken yet. A fetch that waits for records holds nothing and costs nothing. On a full node no connection is read, except
in the middle of a request, and no answer is read from the log: after a while a fetch gets an empty answer, which ends
its wait and that of the answers behind it. Answers that are being read hold no more than a share, however slow the disk
is: they alone never make the node full. `kafka.listener` makes one gateway per way in.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.kafka.api_keys import SERVED
from smq.coordinator.limits import (
    KAFKA_BUDGET_WAIT_S_MAX,
    KAFKA_INFLIGHT_BYTES_PER_NODE_MAX,
    KAFKA_READING_BYTES_PER_NODE_MAX,
)
from smq.coordinator.service.audience import OWN
from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, overloaded, release_all, try_acquire_all
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_members import Memberships
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.transactions import Transactions
from smq.raft_state.state import ClusterState
from smq.replication.measures import Histogram, ProcessMeasures, Series

TURNS_PER_SAMPLE: Final = 7  # a prime number, as producing's


class InflightBytes(ByteBudget):
    """The last request or answer may exceed the bound, because otherwise nothing that large could ever be served."""

    def __init__(self, bytes_max: int = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX) -> None:
        super().__init__(bytes_max, may_overshoot=True)
        reading = ByteBudget(KAFKA_READING_BYTES_PER_NODE_MAX, may_overshoot=True)
        self._for_reading = (reading, self)  # the share first: waiting for it takes no room from others

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    calls: NodeCalls
    groups: GroupCoordinator
    settings: Settings
    request_bytes_max: int
    response_bytes_max: int
    data_dir: str  # absolute
    inflight: InflightBytes
    listener: str = OWN  # that its clients came through
    request_times: Histogram = field(default_factory=lambda: ProcessMeasures().kafka_request)
    # Of each turn in which requests are read, whether those of Produce are timed. Shared: a connection may have few.
    timed_turns: Iterator[bool] = field(default_factory=lambda: cycle([True] + [False] * (TURNS_PER_SAMPLE - 1)))

    def times_of(self, key: int) -> Series:
        return self.request_times.series(SERVED[key].name)

    @property
    def state(self) -> ClusterState:
        return self.calls.node.state

    @property
    def memberships(self) -> Memberships:
        return Memberships(self.calls, self.groups)

    @property
    def transactions(self) -> Transactions:
        return Transactions(self.calls, self.groups)
