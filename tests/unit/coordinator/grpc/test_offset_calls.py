"""AssignOffsets and AdvanceHighWaterMark over gRPC, against a real node: many callers in a message, an answer each."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smq.clients import OffsetAssigner
from smq.clients.errors import error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator import limits
from smq.coordinator.grpc import offset_calls
from smq.raft_state.commands import AssignOffsets, Command
from smq.raft_state.errors import ErrorCode
from smq.raft_state.machine import Machine
from smq.testing.served import Served, served_node

TOO_MANY = limits.OFFSET_REQUESTS_PER_MESSAGE_MAX + 1


async def create(served: Served) -> None:
    request = pb.CreateTopicRequest(name="t", partition_count=2, config={"storage": "external"})
    await served.admin.CreateTopic(request)


def one(correlation_id: int, count: int = 1, **fields: Any) -> pb.Assignment:
    return pb.Assignment(**{"partition": 0, "correlation_id": correlation_id, "topic": "t", "count": count, **fields})


async def assign(served: Served, *messages: list[pb.Assignment]) -> dict[int, tuple[int, int] | str]:
    """The answer to each request of these messages, all sent on one stream: its offsets, or the name of its error."""

    async def send() -> AsyncIterator[pb.AssignOffsetsRequest]:
        for requests in messages:
            yield pb.AssignOffsetsRequest(assignments=requests)

    answers = [a async for response in served.broker.AssignOffsets(send()) for a in response.assigned]
    assert len(answers) == sum(map(len, messages))
    return {a.correlation_id: a.error.name if a.HasField("error") else (a.base_offset, a.last_offset) for a in answers}


def commands(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of callers of each AssignOffsets command that the node applies from now on."""
    sizes: list[int] = []
    apply = Machine.apply

    def counted(self: Machine, index: Any, command: Command) -> Any:
        if isinstance(command, AssignOffsets):
            sizes.append(len(command.items))
        return apply(self, index, command)

    monkeypatch.setattr(Machine, "apply", counted)
    return sizes


async def test_callers_of_a_message_share_a_command_and_get_offsets_in_order(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(served)
    sizes = commands(monkeypatch)
    assert await assign(served, [one(i, count=i) for i in range(1, 5)]) == {1: (0, 0), 2: (1, 2), 3: (3, 5), 4: (6, 9)}
    assert sizes == [4]


async def test_refused_requests_cost_their_neighbours_nothing(served: Served) -> None:
    await create(served)
    await served.create("log")
    requests = [
        one(1),
        one(2, count=0),
        one(3, topic="nope"),
        one(4, partition=7),
        one(5, topic="log"),
        one(6, request_id=b"short"),
        one(7, timeout_ms=-1),
        one(8, not_before=99),
        one(9),
    ]
    assert await assign(served, requests) == {
        1: (0, 0),
        2: "INVALID_REQUEST",
        3: "UNKNOWN_TOPIC",
        4: "UNKNOWN_PARTITION",
        5: "WRONG_STORAGE",
        6: "INVALID_REQUEST",
        7: "INVALID_REQUEST",
        8: "INVALID_OFFSET",
        9: (1, 1),
    }


async def test_a_retry_among_other_neighbours_gets_its_first_answer(served: Served) -> None:
    await create(served)
    ids = [secrets.token_bytes(16) for _ in range(3)]
    first = await assign(served, [one(i, count=2, request_id=ids[i]) for i in range(3)])
    again = await assign(served, [one(7), one(0, count=2, request_id=ids[2])], [one(1, count=2, request_id=ids[0])])
    assert (again[0], again[1]) == (first[2], first[0])
    assert again[7] == (6, 6)


async def test_marks_advance_and_a_refused_one_has_its_own_error(served: Served) -> None:
    await create(served)
    await assign(served, [one(1, count=5)])

    async def send() -> AsyncIterator[pb.AdvanceHighWaterMarkRequest]:
        offsets = [3, 6, 5, 1]
        advances = [
            pb.Advance(partition=0, correlation_id=i, topic="t", offset=offset) for i, offset in enumerate(offsets)
        ]
        yield pb.AdvanceHighWaterMarkRequest(advances=advances)

    answers = [a async for response in served.broker.AdvanceHighWaterMark(send()) for a in response.advanced]
    assert {a.correlation_id: a.hwm for a in answers} == {0: 3, 1: -1, 2: 5, 3: 5}
    assert [a.error.name for a in answers if a.correlation_id == 1] == ["OFFSET_OUT_OF_RANGE"]


@pytest.mark.parametrize("count", [0, TOO_MANY])
async def test_a_message_of_no_or_too_many_requests_ends_the_stream_saying_why(served: Served, count: int) -> None:
    await create(served)
    with pytest.raises(grpc.RpcError) as caught:
        await assign(served, [one(i) for i in range(count)])
    error = error_from_rpc(caught.value, "the node")
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "1 to 1000 entries" in error.message


async def test_a_stream_is_not_read_beyond_its_bound_and_all_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_calls, "OFFSET_REQUESTS_PER_STREAM_MAX", 3)
    most = 0
    begin = offset_calls.OffsetCalls._begin

    def watched(self: Any, requests: Any) -> None:
        nonlocal most
        begin(self, requests)
        most = max(most, self._unanswered)

    monkeypatch.setattr(offset_calls.OffsetCalls, "_begin", watched)

    async with served_node(tmp_path) as served:
        await create(served)
        answers = await assign(served, *([one(i)] for i in range(50)))
        assert sorted(answers.values()) == [(i, i) for i in range(50)]
        assert most == 3


async def test_streams_of_a_connection_are_bounded(served: Served, recwarn: pytest.WarningsRecorder) -> None:
    await create(served)
    most = limits.OFFSET_STREAMS_PER_CONNECTION_MAX
    streams = [served.broker.AssignOffsets() for _ in range(most)]
    for stream in streams:
        await stream.write(pb.AssignOffsetsRequest(assignments=[one(1)]))
        await stream.read()
    with pytest.raises(grpc.RpcError) as caught:
        await served.broker.AssignOffsets().read()  # a write may find the stream ended already
    assert error_from_rpc(caught.value, "the node").code is ErrorCode.LIMIT_EXCEEDED
    for stream in streams:
        await stream.done_writing()
    assert len(await assign(served, [one(1)])) == 1  # there is room again
    gc.collect()
    assert not recwarn.list, "the messages of the refused stream were not begun"


async def test_callers_of_the_python_client_share_messages_and_commands(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: 100 callers cost one message and one command each way per round."""

    await create(served)
    async with OffsetAssigner(served.server.grpc_address[0] + f":{served.server.grpc_address[1]}") as assigner:
        await assigner.assign("t", 0)
        sizes = commands(monkeypatch)
        (stream,) = assigner._assign_streams.values()
        sent = stream.messages_sent

        async def caller() -> list[tuple[int, int]]:
            return [await assigner.assign("t", 0, 3) for _ in range(5)]

        given = [r for ranges in await asyncio.gather(*(caller() for _ in range(100))) for r in ranges]
        assert sorted(given) == [(1 + 3 * n, 3 + 3 * n) for n in range(500)]
        assert stream.messages_sent - sent <= 10
        assert len(sizes) <= 10
        assert sum(sizes) == 500
