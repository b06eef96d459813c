"""Look-ups on a node that lags: what another node created a moment ago is found, and "unknown" follows a barrier."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.lookup import confirm_unknown, find_partition, find_topic, find_topic_name
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import TopicId
from tests.unit.coordinator.lagging import NO_QUORUM, TOPIC, TOPIC_ID, LaggingNode, state_with

LookUp = Callable[[NodeCalls], Awaitable[object]]
OF_TOPIC: tuple[LookUp, ...] = (
    lambda calls: find_topic(calls, TOPIC, 1_000),
    lambda calls: find_topic_name(calls, TOPIC_ID, 1_000),
    lambda calls: find_partition(calls, TOPIC, 0, 1_000),
    lambda calls: confirm_unknown(calls, lambda state: TOPIC in state.topics, 1_000),
)


def looked_up(node: LaggingNode, look_up: LookUp) -> object:
    async def call() -> object:
        return await look_up(NodeCalls(node.api))

    return asyncio.run(call())


@pytest.mark.parametrize("look_up", OF_TOPIC)
def test_a_topic_created_through_another_node_is_found_after_one_barrier(look_up: LookUp) -> None:
    node = LaggingNode()
    looked_up(node, look_up)
    assert TOPIC in node.state.topics
    assert node.barriers == 1


@pytest.mark.parametrize("look_up", OF_TOPIC)
def test_a_known_topic_costs_no_barrier_and_does_not_suspend(look_up: LookUp) -> None:
    async def call() -> None:
        node = LaggingNode()
        node.state = state_with((TOPIC, TOPIC_ID))
        with pytest.raises(StopIteration):  # the coroutine ends before it waits for anything
            look_up(NodeCalls(node.api)).__await__().send(None)
        assert node.barriers == 0

    asyncio.run(call())


@pytest.mark.parametrize("look_up", OF_TOPIC)
def test_nothing_is_called_unknown_without_a_barrier(look_up: LookUp) -> None:
    with pytest.raises(SmqError) as e:
        looked_up(LaggingNode(failure=NO_QUORUM), look_up)
    assert e.value.code is ErrorCode.NO_QUORUM


@pytest.mark.parametrize(
    ("topic", "partition", "code"),
    [
        ("gone", 0, ErrorCode.UNKNOWN_TOPIC),
        (TOPIC, 1, ErrorCode.UNKNOWN_PARTITION),
        (TOPIC, -1, ErrorCode.UNKNOWN_PARTITION),
    ],
)
def test_what_a_barrier_confirms_to_be_unknown_is_named(topic: str, partition: int, code: ErrorCode) -> None:
    node = LaggingNode()
    with pytest.raises(SmqError) as e:
        looked_up(node, lambda calls: find_partition(calls, topic, partition, 1_000))
    assert (e.value.code, node.barriers) == (code, 1)
    assert looked_up(LaggingNode(), lambda calls: find_topic_name(calls, TopicId(bytes(16)), 1_000)) is None
