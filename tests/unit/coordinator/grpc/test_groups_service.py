"""Members of groups over gRPC: joining, assignments, commits that are fenced, and the error of each refusal."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.grpc.gate import host_of
from smq.coordinator.grpc.groups_service import OUTCOME_ERRORS
from smq.raft_state.cluster_config import GROUP_INITIAL_DELAY_MS
from smq.testing.served import Served, fails, served_node

GROUP = "g"


@pytest.fixture
def served(tmp_path: Path) -> AbstractAsyncContextManager[Served]:
    """A node whose groups do not wait for more members before their first generation."""
    return served_node(tmp_path, settings={GROUP_INITIAL_DELAY_MS: "0"})


def join_request(member_id: str = "", **fields: Any) -> pb.JoinGroupRequest:
    protocols = fields.pop("protocols", ["range"])
    return pb.JoinGroupRequest(
        **{
            "group": GROUP,
            "member_id": member_id,
            "client_id": "test",
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 5_000,
            "protocol_type": "consumer",
            "protocols": [pb.GroupProtocol(name=name, metadata=b"m") for name in protocols],
            **fields,
        }
    )


async def join(served: Served, member_id: str = "", **fields: Any) -> pb.JoinGroupResponse:
    """Joins, first for an id if the member has none."""
    answer = await served.groups.JoinGroup(join_request(member_id, **fields))
    if not answer.HasField("generation"):
        answer = await served.groups.JoinGroup(join_request(answer.member_id, **fields))
    return answer  # type: ignore[no-any-return] # stubs of the test are Any


def member(joined: pb.JoinGroupResponse, **fields: Any) -> pb.GroupMember:
    return pb.GroupMember(**{"member_id": joined.member_id, "generation": joined.generation, **fields})


def sync_request(joined: pb.JoinGroupResponse, *, assign: bytes | None = None, **fields: Any) -> pb.SyncGroupRequest:
    assignments = (
        []
        if assign is None
        else [pb.MemberAssignment(member_id=m.member_id, assignment=assign) for m in joined.members]
    )
    return pb.SyncGroupRequest(
        group=GROUP,
        member=member(joined),
        protocol_type="consumer",
        assignments=assignments,
        **{"protocol": joined.protocol, **fields},
    )


async def stable(served: Served) -> pb.JoinGroupResponse:
    """The only member of a group that has its assignment."""
    joined = await join(served)
    answer = await served.groups.SyncGroup(sync_request(joined, assign=b"mine"))
    assert answer.assignment == b"mine"
    return joined


def commit_request(**fields: Any) -> pb.CommitOffsetsRequest:
    return pb.CommitOffsetsRequest(
        group=GROUP, offsets=[pb.PartitionOffset(topic="t", partition=0, offset=1)], **fields
    )


async def test_two_members_share_a_generation_and_the_leader_assigns(served: Served) -> None:
    first = await stable(served)
    assert (first.leader, [m.member_id for m in first.members]) == (first.member_id, [first.member_id])
    joining = asyncio.create_task(join(served))
    beat = pb.HeartbeatRequest(group=GROUP, member=member(first))
    while not (await served.groups.Heartbeat(beat)).rebalancing:  # noqa: ASYNC110 - the join takes a round trip
        await asyncio.sleep(0)
    again, other = await asyncio.gather(join(served, first.member_id), joining)
    assert (again.generation, other.generation) == (first.generation + 1,) * 2
    assert again.leader == other.leader == first.member_id
    assert sorted(m.member_id for m in again.members) == sorted([first.member_id, other.member_id])
    assert not other.members
    usurping = sync_request(other)
    usurping.assignments.add(member_id=other.member_id, assignment=b"all")
    assert (await fails(served.groups.SyncGroup(usurping))).name == "INVALID_REQUEST"
    waiting = asyncio.ensure_future(served.groups.SyncGroup(sync_request(other)))
    await served.groups.SyncGroup(sync_request(again, assign=b"half"))
    assert (await waiting).assignment == b"half"
    described = await served.admin.DescribeGroup(pb.DescribeGroupRequest(group=GROUP))
    assert {m.client_host for m in described.members} == {"127.0.0.1"}


async def test_commits_are_taken_from_members_of_the_present_generation_alone(served: Served) -> None:
    await served.create("t")
    joined = await stable(served)
    await served.broker.CommitOffsets(commit_request(member=member(joined)))
    for refused, code in (
        (commit_request(), "UNKNOWN_MEMBER"),
        (commit_request(member=member(joined, member_id="stranger")), "UNKNOWN_MEMBER"),
        (commit_request(member=member(joined, generation=joined.generation + 1)), "ILLEGAL_GENERATION"),
        (commit_request(member=pb.GroupMember(member_id=joined.member_id)), "INVALID_REQUEST"),
        (commit_request(member=member(joined, generation=-1)), "INVALID_REQUEST"),
    ):
        assert (await fails(served.broker.CommitOffsets(refused))).name == code
    await served.groups.LeaveGroup(pb.LeaveGroupRequest(group=GROUP, member_id=joined.member_id))
    assert (await fails(served.broker.CommitOffsets(commit_request(member=member(joined))))).name == "UNKNOWN_MEMBER"
    await served.broker.CommitOffsets(commit_request())


async def test_static_member_that_comes_back_has_its_assignment_and_fences_its_former_self(served: Served) -> None:
    joined = await join(served, instance_id="one")
    request = sync_request(joined, assign=b"mine")
    request.member.instance_id = "one"
    await served.groups.SyncGroup(request)
    back = await join(served, instance_id="one")
    assert (back.generation, back.skip_assignment) == (joined.generation, True)
    assert (await served.groups.SyncGroup(sync_request(back))).assignment == b"mine"
    beat = pb.HeartbeatRequest(group=GROUP, member=member(joined, instance_id="one"))
    assert (await fails(served.groups.Heartbeat(beat))).name == "FENCED_INSTANCE"


async def test_refusals_name_what_is_wrong(served: Served) -> None:
    joined = await stable(served)
    wrong = member(joined, member_id="stranger")
    for call, code in (
        (served.groups.JoinGroup(join_request(group="")), "INVALID_REQUEST"),
        (served.groups.JoinGroup(join_request(session_timeout_ms=1)), "INVALID_REQUEST"),
        (served.groups.JoinGroup(join_request(protocols=["range", "range"])), "INVALID_REQUEST"),
        (served.groups.JoinGroup(join_request(protocols=["sticky"])), "INCONSISTENT_PROTOCOL"),
        (served.groups.JoinGroup(join_request(protocol_type="connect")), "INCONSISTENT_PROTOCOL"),
        (served.groups.JoinGroup(join_request("stranger")), "UNKNOWN_MEMBER"),
        (served.groups.Heartbeat(pb.HeartbeatRequest(group=GROUP, member=wrong)), "UNKNOWN_MEMBER"),
        (served.groups.Heartbeat(pb.HeartbeatRequest(group=GROUP)), "INVALID_REQUEST"),
        (served.groups.SyncGroup(sync_request(joined, protocol="sticky")), "INCONSISTENT_PROTOCOL"),
        (served.groups.LeaveGroup(pb.LeaveGroupRequest(group=GROUP, member_id="stranger")), "UNKNOWN_MEMBER"),
    ):
        assert (await fails(call)).name == code


async def test_join_that_is_given_up_leaves_nothing_behind(served: Served) -> None:
    first = await stable(served)
    reserved = await served.groups.JoinGroup(join_request())
    waiting = served.groups.JoinGroup(join_request(reserved.member_id))
    beat = pb.HeartbeatRequest(group=GROUP, member=member(first))
    while not (await served.groups.Heartbeat(beat)).rebalancing:  # noqa: ASYNC110 - the join takes a round trip
        await asyncio.sleep(0)
    waiting.cancel()
    alone = await join(served, first.member_id)  # the round ends without the other
    assert [m.member_id for m in alone.members] == [first.member_id]


def test_every_outcome_has_its_error() -> None:
    of_heartbeats = {
        Outcome.FENCED_EPOCH,
        Outcome.UNRELEASED_INSTANCE,
        Outcome.UNKNOWN_ASSIGNOR,
        Outcome.BAD_PATTERN,
    }  # of consumer groups, which this port does not have
    assert OUTCOME_ERRORS.keys() == set(Outcome) - {Outcome.OK, Outcome.ID_RESERVED} - of_heartbeats


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.1.2.3:5000", "10.1.2.3"), ("ipv6:%5B::1%5D:5000", "::1"), ("unix:", "")]
)
def test_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host
