"""Requests that name a topic by id, while another topic takes its name: none of them may reach the other one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from smq.coordinator.kafka.cluster_view import NO_TOPIC_ID
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.fetch import fetch
from smq.coordinator.kafka.topic_admin import delete_topics
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.ids import LogIndex, TopicId
from smq.replication.api import DoneFn
from tests.unit.coordinator.kafka.gateways import fetch_of, gateway_to
from tests.unit.coordinator.lagging import TOPIC, TOPIC_ID, LaggingNode, state_with

LATER_ID = TopicId(bytes(15) + b"l")


class RecreatingNode(LaggingNode):
    """It has the first topic. If it `lags`, a barrier brings the other one."""

    def __init__(self, *, lags: bool = False) -> None:
        super().__init__()
        self.state = state_with((TOPIC, TOPIC_ID))
        self._lags = lags

    def recreate(self) -> None:
        self.state = state_with((TOPIC, LATER_ID))

    def barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        if self._lags:
            self.recreate()
        done(LogIndex(1))


class FullUntilRecreated(InflightBytes):
    """A fetch waits for room, and the topic is created again in the meantime."""

    def __init__(self, node: RecreatingNode) -> None:
        super().__init__()
        self._node = node

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        self._node.recreate()
        async with super().reserved(size):
            yield


@pytest.mark.parametrize(
    ("version", "name", "topic_id", "answer"),
    [
        (12, TOPIC, NO_TOPIC_ID, (KafkaError.NONE, 0)),
        (13, "", TOPIC_ID, (KafkaError.UNKNOWN_TOPIC_ID, -1)),
    ],
)
def test_a_fetch_by_id_does_not_read_another_topic_of_that_name(
    version: int, name: str, topic_id: bytes, answer: tuple[KafkaError, int]
) -> None:
    node = RecreatingNode()
    gateway = gateway_to(NodeCalls(node.api), FullUntilRecreated(node))
    (topic,) = asyncio.run(fetch(gateway, version, fetch_of(name, topic_id)))["responses"]
    (found,) = topic["partitions"]
    assert (found["error_code"], found["high_watermark"]) == answer


@pytest.mark.parametrize(
    ("lags", "topic_id", "code", "commands"),
    [
        (False, TOPIC_ID, KafkaError.NONE, 1),
        (True, TOPIC_ID, KafkaError.UNKNOWN_TOPIC_ID, 0),
        (True, LATER_ID, KafkaError.NONE, 1),
    ],
)
def test_a_node_that_lags_does_not_delete_another_topic_of_that_name(
    lags: bool, topic_id: TopicId, code: KafkaError, commands: int
) -> None:
    node = RecreatingNode(lags=lags)
    request = {"timeout_ms": 1_000, "topics": [{"name": None, "topic_id": topic_id}]}
    gateway = gateway_to(NodeCalls(node.api), InflightBytes())
    (answer,) = asyncio.run(delete_topics(gateway, 6, request))["responses"]
    assert (answer["error_code"], len(node.proposed)) == (code, commands)
