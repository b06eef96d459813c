"""Rules of live groups, as tables: what a failed command means, how a round ends, and which partitions have no member.

What they admit, refuse and evict is tested through the coordinator."""

from dataclasses import replace

import pytest

from smq.clients.groups.protocol import Subscription, encode_assignment, encode_subscription
from smq.coordinator.groups.live import LiveGroup
from smq.coordinator.groups.member_requests import Join, Outcome, outcome_of_failure
from smq.coordinator.groups.protocols import is_partition_free
from smq.coordinator.groups.transitions import LEADS_TO, TABLE, Action, Event, Phase
from smq.coordinator.groups.waiting import PendingJoin, Round, RoundEnd, round_end
from smq.raft_state.commands import GroupMember
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Generation
from smq.raft_state.state import GroupPhase, GroupState, MemberState
from tests.unit.raft_state.support import member

A, B, S = member("a"), member("b"), member("s", instance="i")


def states(*members: GroupMember) -> dict[str, MemberState]:
    return {m.member_id: MemberState(member=m) for m in members}


def test_every_action_of_the_table_can_be_run_and_is_used() -> None:
    assert set(TABLE.values()) == set(Action) == set(LiveGroup.actions)
    assert set(TABLE) == {(phase, event) for phase in Phase for event in Event}
    assert set(LEADS_TO) <= set(Action)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (ErrorCode.NOT_COORDINATOR, Outcome.NOT_COORDINATOR),
        (ErrorCode.SHUTTING_DOWN, Outcome.NOT_COORDINATOR),
        (ErrorCode.LIMIT_EXCEEDED, Outcome.LIMIT_EXCEEDED),
        (ErrorCode.INVALID_REQUEST, Outcome.BAD_GROUP),
        (ErrorCode.TIMED_OUT, Outcome.UNCERTAIN),
        (ErrorCode.NO_QUORUM, Outcome.UNCERTAIN),
        (ErrorCode.ILLEGAL_GENERATION, Outcome.UNCERTAIN),
    ],
)
def test_failure_of_a_command_has_an_outcome(code: ErrorCode, outcome: Outcome) -> None:
    assert outcome_of_failure(SmqError(code, "x")) is outcome


@pytest.mark.parametrize(
    ("members", "joiners", "is_first", "has_reserved_ids", "now_ns", "end"),
    [
        ((), (A,), True, False, 9, RoundEnd.WAIT),
        ((), (A,), True, False, 10, RoundEnd.FORM),
        ((A, B), (A,), False, False, 9, RoundEnd.WAIT),
        ((A, B), (A,), False, False, 10, RoundEnd.FORM),
        ((A, B), (A, B), False, False, 9, RoundEnd.FORM),
        ((A, B), (A, B), False, True, 9, RoundEnd.WAIT),
        ((A, B), (), False, False, 10, RoundEnd.REMOVE_ABSENT),
        ((A, S), (), False, False, 10, RoundEnd.WAIT_FOR_STATIC),
    ],
)
def test_round_ends(
    members: tuple[GroupMember, ...],
    joiners: tuple[GroupMember, ...],
    is_first: bool,
    has_reserved_ids: bool,
    now_ns: int,
    end: RoundEnd,
) -> None:
    asked = [
        Join(group="g", member=m, protocol_type="", takes_id_first=True, can_skip_assignment=True) for m in joiners
    ]
    waiting = {join.member.member_id: PendingJoin(join, join.member, lambda _: None) for join in asked}
    round_ = Round(until_ns=10, limit_ns=20, is_first=is_first, joiners=waiting)
    assert round_end(round_, states(*members), has_reserved_ids=has_reserved_ids, now_ns=now_ns) is end


@pytest.mark.parametrize(
    ("protocol_type", "protocol", "assignments", "is_free"),
    [
        ("consumer", "range", (encode_assignment([("t", 0)]), encode_assignment([("t", 1)])), False),
        ("consumer", "range", (encode_assignment([("t", 0)]), encode_assignment([("t", 0), ("u", 1)])), True),
        ("consumer", "range", (encode_assignment([("t", 0)]), b""), True),
        ("consumer", "range", (b"", b"?"), False),
        ("consumer", "range", (b"", encode_assignment([("t", 0)])[:-5]), False),
        ("connect", "range", (b"", b""), False),
        ("consumer", "sticky", (b"", b""), False),
    ],
)
def test_partition_is_free_only_if_subscriptions_and_assignments_say_so(
    protocol_type: str, protocol: str, assignments: tuple[bytes, bytes], is_free: bool
) -> None:
    metadata = encode_subscription(Subscription(topics=("t", "none")), is_cooperative=False)
    found = GroupState(
        name="g",
        generation=Generation(3),
        phase=GroupPhase.STABLE,
        protocol_type=protocol_type,
        protocol=protocol,
        leader="a",
        members={
            name: replace(states(member(name, metadata=metadata))[name], assignment=data)
            for name, data in zip("ab", assignments, strict=True)
        },
    )
    assert is_partition_free(found, lambda topic: 2 if topic == "t" else 0) is is_free  # no other topic exists
