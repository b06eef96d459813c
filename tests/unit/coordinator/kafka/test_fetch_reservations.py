"""How much of the node's budget a Fetch reserves while its answer is read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.coordinator.kafka.fetch import fetch
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.ids import Offset
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, TOPIC_CONFIG
from smq.replication.api import Fetched
from tests.unit.coordinator.kafka.gateways import gateway_to
from tests.unit.coordinator.lagging import TOPIC, TOPIC_ID, state_with

BATCH_MAX = int(TOPIC_CONFIG[MAX_MESSAGE_BYTES].default)


class Reserved(InflightBytes):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        self.sizes.append(size)
        async with super().reserved(size):
            yield


def _fetch_nothing(*_args: Any, done: Callable[[Fetched], None], **_options: Any) -> Callable[[], None]:
    done(Fetched([], Offset(0), Offset(0), Offset(0), Offset(0)))
    return lambda: None


def _reserved(partition_bytes: list[int], *, max_bytes: int = 50 * MIB, config: dict[str, str] | None = None) -> int:
    """By a Fetch that asks for this many bytes of each partition."""
    state, inflight = state_with((TOPIC, TOPIC_ID)), Reserved()
    topic = state.topics[TOPIC]
    topic.config = config or {}
    topic.partitions *= len(partition_bytes)
    node = SimpleNamespace(state=state, node_id=1, fetch=_fetch_nothing)
    gateway = gateway_to(NodeCalls(cast(Any, node)), inflight)
    partitions = [
        {"partition": i, "current_leader_epoch": -1, "fetch_offset": 0, "partition_max_bytes": size}
        for i, size in enumerate(partition_bytes)
    ]
    request = {
        "session_id": 0,
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "rack_id": "",
        "topics": [{"topic": TOPIC, "topic_id": bytes(16), "partitions": partitions}],
    }
    asyncio.run(cast(Any, fetch(gateway, 12, request)))
    (size,) = inflight.sizes
    return size


@pytest.mark.parametrize(
    ("partition_bytes", "expected"),
    [
        ([2 * MIB], 2 * MIB),
        ([2 * MIB] * 3, 6 * MIB),
        ([2 * MIB] * 100, 8 * MIB),  # the node's largest answer
        ([1, 1], 2 * BATCH_MAX),  # a batch is read whole, however little is asked for
    ],
)
def test_a_fetch_reserves_what_it_asks_for(partition_bytes: list[int], expected: int) -> None:
    assert _reserved(partition_bytes) == expected


def test_a_fetch_reserves_no_more_than_its_own_maximum() -> None:
    assert _reserved([2 * MIB] * 3, max_bytes=3 * MIB) == 3 * MIB


def test_a_fetch_reserves_room_for_the_topic_s_largest_batch() -> None:
    assert _reserved([MIB], config={MAX_MESSAGE_BYTES: str(4 * MIB)}) == 4 * MIB
