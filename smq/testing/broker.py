"""A real broker in the test's own process, ready in well under a second: for tests of programs that use smq or Kafka.

Owns the thread that the node runs in, and short ways to make topics. It is a whole node with its own disk under the
given directory, so what it acknowledges is fsynced as in production. A fatal error of the node ends the process, as it
would end a node. For clusters and faults use `smq.testing.faults`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from smq.clients import SyncAdmin
from smq.coordinator.config.addresses import format_address
from smq.testing.loops import in_thread
from smq.testing.served import Served, served_node


@dataclass
class Broker:
    """`kafka` is what Kafka clients call bootstrap.servers; `grpc` is for smq's own clients and `smq --bootstrap`."""

    kafka: str
    grpc: str
    http: str
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def create_topic(
        self, name: str | None = None, partitions: int = 1, *, config: Mapping[str, str] | None = None
    ) -> str:
        """Makes a topic, under a fresh name unless one is given, and returns its name. It takes records immediately."""
        chosen = name if name is not None else f"test-{next(self._numbers)}"
        with SyncAdmin(self.grpc) as admin:
            admin.create_topic(chosen, partitions, config=config)
        return chosen


@contextmanager
def running_broker(directory: Path) -> Iterator[Broker]:
    """A broker with its data under `directory`, on free ports. It ends with the block; the data stays."""
    with in_thread(_ready(directory)) as served:
        server = served.server
        assert server.kafka_address is not None
        addresses = (server.kafka_address, server.grpc_address, server.http_address)
        kafka, grpc, http = map(format_address, addresses)
        yield Broker(kafka, grpc, http)


@asynccontextmanager
async def _ready(directory: Path) -> AsyncIterator[Served]:
    settings = {"group.initial.rebalance.delay.ms": "0"}  # a test's consumer should not wait for others
    async with served_node(directory, kafka_address=("127.0.0.1", 0), settings=settings) as served:
        state = served.server.node
        while not any(slot.node for slot in state.state.coordinators):  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.001)  # until a node coordinates groups
        yield served
