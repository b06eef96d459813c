"""Answers about thousands of partitions: how many of them one turn of the event loop makes."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.coordinator.grpc import admin as grpc_admin
from smq.coordinator.kafka import metadata
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.service import turns
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import LogIndex
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState
from smq.replication.api import NodeApi
from tests.unit.raft_state.support import register
from tests.unit.raft_state.support import topic as created

TOPICS, PARTITIONS = 3, 400


def state() -> ClusterState:
    machine = Machine()
    machine.apply(LogIndex(0), default_init("c"))
    machine.apply(LogIndex(1), register(1, kafka="h:3"))
    for n in range(TOPICS):
        machine.apply(LogIndex(2 + n), created(n, partitions=PARTITIONS, replicas=1))
    return machine.state


def most_in_a_turn(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, answer: Callable[[], Awaitable[object]]
) -> tuple[int, int]:
    """How often the answer called the module's function: at most in one turn, and in all."""
    called, turn = Counter[int](), 0
    function = getattr(module, name)

    def counted(*arguments: Any) -> Any:
        called[turn] += 1
        return function(*arguments)

    monkeypatch.setattr(module, name, counted)

    async def run() -> None:
        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        next_turn()
        await answer()

    asyncio.run(run())
    return max(called.values()), called.total()


def test_kafkas_metadata_of_all_topics_is_made_some_partitions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = state()
    gateway = cast(Gateway, SimpleNamespace(state=known, listener=""))

    async def answer() -> None:
        together = Turns()
        for topic in known.topics.values():
            made = await metadata._topic(gateway, topic, together)
            assert [p["partition_index"] for p in made["partitions"]] == list(range(PARTITIONS))

    most, count = most_in_a_turn(monkeypatch, metadata, "describe_partition", answer)
    assert (most, count) == (turns.ITEMS_PER_TURN, TOPICS * PARTITIONS)


def test_the_description_of_all_topics_is_made_some_partitions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = state()
    node = cast(NodeApi, SimpleNamespace(state=known, known_hwm=lambda partition: partition.hwm))

    async def answer() -> None:
        together = Turns()
        for topic in known.topics.values():
            made = await grpc_admin._topic_info(topic, node, None, together)
            assert [p.partition for p in made.partitions] == list(range(PARTITIONS))

    most, count = most_in_a_turn(monkeypatch, grpc_admin, "_partition_info", answer)
    assert (most, count) == (turns.ITEMS_PER_TURN, TOPICS * PARTITIONS)
