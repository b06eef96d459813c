"""The client of offsets without records, over real gRPC: its retries repeat the request and never assign twice."""

from typing import Any

import pytest

from smq.clients import ErrorCode, OffsetAssigner, SmqError
from smq.clients.pb import smq_pb2 as pb
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of
from smq.testing.loops import run


def assigner_of(cluster: FakeCluster) -> OffsetAssigner:
    return OffsetAssigner(cluster.servers)


def losing_answers(cluster: FakeCluster, count: int) -> list[pb.AssignOffsetsRequest]:
    """The next `count` assignments take effect without an answer. Returns all attempts, in order."""
    left, attempts = iter(range(count)), list[pb.AssignOffsetsRequest]()

    def lose(name: str, request: Any) -> None:
        if name == "AssignOffsets":
            attempts.append(request)
            if next(left, None) is not None:
                cluster.assign(request)
                raise SmqError(ErrorCode.TIMED_OUT, "the answer was lost")

    for node in cluster.nodes.values():
        node.hook = lose
    return attempts


def test_retry_at_another_node_repeats_the_request_and_names_an_offset_from_before_it() -> None:
    async def scenario() -> None:
        async with cluster_of(2, t=1) as cluster, assigner_of(cluster) as assigner:
            assert await assigner.assign("t", 0, 5) == (0, 4)
            cluster.assigned["t", 0] = 900  # other callers have been busy in the meantime
            attempts = losing_answers(cluster, 2)
            assert await assigner.assign("t", 0, 3) == (900, 902)
            assert cluster.applied == ["assign", "assign"]
            assert len({attempt.request_id for attempt in attempts}) == 1
            assert [a.HasField("not_before") for a in attempts] == [False, True, True]
            assert {a.not_before for a in attempts[1:]} == {5}

    run(scenario())


def test_callers_own_id_and_bound_are_sent_with_the_first_attempt() -> None:
    async def scenario() -> None:
        async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
            attempts = losing_answers(cluster, 0)
            first = await assigner.assign("t", 0, 2, request_id=b"i" * 16, not_before=0)
            assert await assigner.assign("t", 0, 2, request_id=b"i" * 16, not_before=0) == first
            assert [(a.request_id, a.HasField("not_before")) for a in attempts] == [(b"i" * 16, True)] * 2

    run(scenario())


def test_expired_request_is_not_repeated() -> None:
    async def scenario() -> None:
        async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:

            def expire(name: str, _request: Any) -> None:
                if name == "AssignOffsets":
                    raise SmqError(ErrorCode.REQUEST_EXPIRED, "too old")

            cluster.nodes[1].hook = expire
            with pytest.raises(SmqError, match="too old"):
                await assigner.assign("t", 0)
            assert cluster.nodes[1].seen.count("AssignOffsets") == 1

    run(scenario())


def test_mark_is_advanced_and_refused_beyond_what_was_assigned() -> None:
    async def scenario() -> None:
        async with cluster_of(1, t=1) as cluster, assigner_of(cluster) as assigner:
            await assigner.assign("t", 0, 5)
            assert await assigner.advance("t", 0, 5) == 5
            with pytest.raises(SmqError) as caught:
                await assigner.advance("t", 0, 6)
            assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE

    run(scenario())
