"""The client of offsets without records, over real gRPC: its retries repeat the request and never assign twice."""

import asyncio
from typing import Any

import pytest

from smq.clients import ErrorCode, OffsetAssigner, SmqError
from smq.clients.pb import smq_pb2 as pb
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of


def assigner_of(cluster: FakeCluster) -> OffsetAssigner:
    return OffsetAssigner(cluster.servers)


def losing_answers(cluster: FakeCluster, count: int) -> list[pb.Assignment]:
    """The next `count` assignments take effect without an answer. Returns all attempts, in order."""
    left, attempts = iter(range(count)), list[pb.Assignment]()

    def lose(name: str, request: Any) -> None:
        if name == "AssignOffsets":
            attempts.append(request)
            if next(left, None) is not None:
                cluster.assign(request)
                raise SmqError(ErrorCode.TIMED_OUT, "the answer was lost")

    for node in cluster.nodes.values():
        node.hook = lose
    return attempts


async def test_retry_at_another_node_repeats_the_request_and_names_an_offset_from_before_it() -> None:
    async with cluster_of(2, t=1) as cluster, assigner_of(cluster) as assigner:
        assert await assigner.assign("t", 0, 5) == (0, 4)
        cluster.assigned["t", 0] = 900  # other callers have been busy in the meantime
        attempts = losing_answers(cluster, 2)
        assert await assigner.assign("t", 0, 3) == (900, 902)
        assert cluster.applied == ["assign", "assign"]
        assert len({attempt.request_id for attempt in attempts}) == 1
        assert [a.HasField("not_before") for a in attempts] == [False, True, True]
        assert {a.not_before for a in attempts[1:]} == {5}


async def test_callers_own_id_and_bound_are_sent_with_the_first_attempt() -> None:
    async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
        attempts = losing_answers(cluster, 0)
        first = await assigner.assign("t", 0, 2, request_id=b"i" * 16, not_before=0)
        assert await assigner.assign("t", 0, 2, request_id=b"i" * 16, not_before=0) == first
        assert [(a.request_id, a.HasField("not_before")) for a in attempts] == [(b"i" * 16, True)] * 2


async def test_expired_request_is_not_repeated() -> None:
    async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:

        def expire(name: str, _request: Any) -> None:
            if name == "AssignOffsets":
                raise SmqError(ErrorCode.REQUEST_EXPIRED, "too old")

        cluster.nodes[1].hook = expire
        with pytest.raises(SmqError, match="too old"):
            await assigner.assign("t", 0)
        assert cluster.nodes[1].seen.count("AssignOffsets") == 1


async def test_mark_is_advanced_and_refused_beyond_what_was_assigned() -> None:
    async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
        await assigner.assign("t", 0, 5)
        assert await assigner.advance("t", 0, 5) == 5
        with pytest.raises(SmqError) as caught:
            await assigner.advance("t", 0, 6)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


async def test_callers_of_one_turn_share_a_message() -> None:
    async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
        await assigner.assign("t", 0)
        cluster.nodes[1].seen.clear()
        given = await asyncio.gather(*(assigner.assign("t", 0, 2) for _ in range(50)))
        assert sorted(given) == [(1 + 2 * n, 2 + 2 * n) for n in range(50)]
        assert cluster.nodes[1].seen.count("AssignOffsets") == 50
        assert cluster.nodes[1].seen.count("a message of AssignOffsets") == 1


async def test_a_stream_that_breaks_costs_no_caller_its_offsets_and_none_is_assigned_twice() -> None:
    async with cluster_of(2, t=1) as cluster, assigner_of(cluster) as assigner:
        assert await assigner.assign("t", 0) == (0, 0)

        async def die(name: str, request: Any) -> None:
            if name == "AssignOffsets":
                cluster.assign(request)  # it took effect, and its answer is lost with the node
                await cluster.nodes[1].stop()

        cluster.nodes[1].hook = die
        given = await asyncio.gather(*(assigner.assign("t", 0, 2) for _ in range(5)))
        assert sorted(given) == [(1 + 2 * n, 2 + 2 * n) for n in range(5)]
        await cluster.nodes[1].restart()
        cluster.nodes[1].hook = lambda name, request: None
        await cluster.nodes[2].stop()
        assert await assigner.assign("t", 0) == (11, 11)  # over a new stream


async def test_a_node_that_hangs_costs_its_callers_their_deadline_and_no_more() -> None:
    async with cluster_of(1, t=1) as cluster, OffsetAssigner(cluster.servers, timeout_ms=300) as assigner:
        await assigner.assign("t", 0)
        is_over = asyncio.Event()
        cluster.nodes[1].hook = lambda name, request: is_over.wait() if name == "AssignOffsets" else None
        with pytest.raises(SmqError) as caught:
            await assigner.assign("t", 0)
        assert caught.value.code is ErrorCode.TIMED_OUT
        is_over.set()
        cluster.nodes[1].hook = lambda name, request: None
        assert (await assigner.assign("t", 0))[0] == 2  # over the same stream, on which the late answer is ignored


async def test_a_request_that_no_message_should_carry_is_refused_alone() -> None:
    async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
        await assigner.assign("t", 0)
        bad = assigner.assign("t", 0, request_id=b"x" * 5_000)
        good, refused = await asyncio.gather(assigner.assign("t", 0), bad, return_exceptions=True)
        assert good == (1, 1)
        assert isinstance(refused, SmqError)
        assert refused.code is ErrorCode.INVALID_REQUEST


async def test_closing_ends_callers_that_wait() -> None:
    async with cluster_of(1, t=1) as cluster:
        assigner = assigner_of(cluster)
        await assigner.start()
        await assigner.assign("t", 0)
        has_come = asyncio.Event()

        async def hold(name: str, request: Any) -> None:
            has_come.set()
            await asyncio.Event().wait()

        cluster.nodes[1].hook = hold
        waiting = [asyncio.create_task(assigner.assign("t", 0)) for _ in range(3)]
        await has_come.wait()  # the first, which holds the others up
        await assigner.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [error.code for error in ended if isinstance(error, SmqError)] == [ErrorCode.TIMED_OUT] * 3
        with pytest.raises(SmqError, match="is closed"):
            await assigner.assign("t", 0)
