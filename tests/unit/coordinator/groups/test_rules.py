"""The pure rules of live groups, as tables: admission, identities, expired members, and the end of a round."""

from dataclasses import replace

import pytest

from smq.clients.groups.protocol import Subscription, encode_assignment, encode_subscription
from smq.coordinator.groups.live import LiveGroup, joined, joined_as_former, sync_refusal
from smq.coordinator.groups.member_checks import Present, Verdict, admission, check_identity, resolve_leaver
from smq.coordinator.groups.member_requests import Identity, Outcome, Sync, outcome_of_failure
from smq.coordinator.groups.protocols import is_partition_free
from smq.coordinator.groups.session_timeouts import NEVER_NS, NS_PER_MS, Sessions, sessions_of, silent_members
from smq.coordinator.groups.transitions import LEADS_TO, TABLE, Action, Event, Phase, phase_of
from smq.coordinator.groups.waiting import Round, RoundEnd, generation_of, new_round, round_end
from smq.raft_state.commands import GroupMember
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch
from smq.raft_state.limits import GROUP_BYTES_MAX, GROUP_MEMBERS_MAX, MEMBER_BYTES_CLUSTER_MAX
from smq.raft_state.state import GroupPhase
from tests.unit.coordinator.groups.values import GROUP, group, patient, present, request, states, waiting
from tests.unit.raft_state.support import member

A, B, S = member("a"), member("b"), member("s", instance="i")
NEW, NEW_S = member(""), member("", instance="i")
JOINING, STABLE, SYNCING = GroupPhase.PREPARING, GroupPhase.STABLE, GroupPhase.COMPLETING
SECOND_NS = 1_000_000_000


def has_two(topic: str) -> int:
    """Partitions of a topic: `t` alone exists."""
    return 2 if topic == "t" else 0


# ------------------------------------------------------------------------------------------------- the table
def test_every_action_of_the_table_can_be_run_and_is_used() -> None:
    assert set(TABLE.values()) == set(Action) == set(LiveGroup.actions)
    assert set(TABLE) == {(phase, event) for phase in Phase for event in Event}
    assert set(LEADS_TO) <= set(Action)


@pytest.mark.parametrize("event", [Event.APPLIED, Event.FAILED])
def test_reply_of_a_command_matters_only_while_it_is_under_way(event: Event) -> None:
    assert {phase for phase in Phase if TABLE[phase, event] is not Action.NOTHING} == {Phase.CHANGING}


def test_nothing_leads_out_of_a_closed_group() -> None:
    assert {phase for event in Event for phase in LEADS_TO.get(TABLE[Phase.CLOSED, event], ())} == set()


@pytest.mark.parametrize(
    ("is_closed", "is_changing", "has_round", "replicated", "phase"),
    [
        (True, True, True, GroupPhase.STABLE, Phase.CLOSED),
        (False, True, True, GroupPhase.STABLE, Phase.CHANGING),
        (False, False, True, GroupPhase.STABLE, Phase.JOINING),
        (False, False, True, GroupPhase.EMPTY, Phase.JOINING),
        (False, False, False, GroupPhase.PREPARING, Phase.JOINING),
        (False, False, False, GroupPhase.COMPLETING, Phase.SYNCING),
        (False, False, False, GroupPhase.STABLE, Phase.STABLE),
        (False, False, False, GroupPhase.EMPTY, Phase.EMPTY),
    ],
)
def test_phase_follows_from_the_object_first_and_from_the_state_then(
    is_closed: bool, is_changing: bool, has_round: bool, replicated: GroupPhase, phase: Phase
) -> None:
    found = phase_of(is_closed=is_closed, is_changing=is_changing, has_round=has_round, replicated=replicated)
    assert found is phase


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


# ------------------------------------------------------------------------------------------------- admission
@pytest.mark.parametrize(
    ("asking", "there", "may_repeat", "verdict"),
    [
        (NEW, present(), False, Verdict.RESERVE_ID),
        (NEW_S, present(), False, Verdict.ENTER_AS_NEW),
        (A, present(reserved=("a",)), False, Verdict.ENTER),
        (A, present(None, A), False, Verdict.ENTER),
        (A, present(group(A, B)), False, Verdict.ENTER),
        (B, present(group(A, B)), True, Verdict.REPEAT),
        (A, present(group(A, B)), True, Verdict.ENTER),  # the leader of a stable group wants a new assignment
        (A, present(group(A, B, phase=SYNCING)), True, Verdict.REPEAT),
        (member("b", metadata=b"other"), present(group(A, B)), True, Verdict.ENTER),
        (NEW_S, present(group(A, S)), True, Verdict.REPLACE),
        (member("", "sticky", instance="i"), present(group(S)), True, Verdict.REMOVE_FORMER),
        (NEW_S, present(None, S), False, Verdict.ENTER_AS_NEW),
    ],
)
def test_member_is_admitted(asking: GroupMember, there: Present, may_repeat: bool, verdict: Verdict) -> None:
    decision = admission(request(asking), there, may_repeat=may_repeat)
    assert decision.verdict is verdict
    assert (decision.former is not None) is (verdict in (Verdict.REPLACE, Verdict.REMOVE_FORMER))


def test_old_client_enters_without_an_id_of_its_own() -> None:
    decision = admission(request(NEW, takes_id_first=False), present(), may_repeat=False)
    assert decision.verdict is Verdict.ENTER_AS_NEW


FULL = group(*(member(f"m{n}") for n in range(GROUP_MEMBERS_MAX)))


@pytest.mark.parametrize(
    ("asking", "there", "outcome"),
    [
        (member("", "sticky"), present(group(A)), Outcome.PROTOCOL_MISMATCH),
        (member("", "sticky"), present(None, A), Outcome.PROTOCOL_MISMATCH),
        (replace(NEW, protocols=()), present(), Outcome.PROTOCOL_MISMATCH),
        (member("x"), present(group(A)), Outcome.UNKNOWN_MEMBER),
        (member("x"), present(), Outcome.UNKNOWN_MEMBER),
        (member("a", instance="i"), present(group(A, S)), Outcome.FENCED_INSTANCE),
        (member("a", instance="j"), present(group(A, S)), Outcome.UNKNOWN_MEMBER),
        (NEW, present(FULL), Outcome.GROUP_FULL),
        (NEW, present(None, reserved=tuple(map(str, range(GROUP_MEMBERS_MAX)))), Outcome.GROUP_FULL),
        (member("", metadata=bytes(GROUP_BYTES_MAX)), present(group(A)), Outcome.GROUP_FULL),
        (NEW, replace(present(), member_bytes=MEMBER_BYTES_CLUSTER_MAX), Outcome.GROUP_FULL),
    ],
)
def test_member_is_refused(asking: GroupMember, there: Present, outcome: Outcome) -> None:
    decision = admission(request(asking), there, may_repeat=True)
    assert (decision.verdict, decision.outcome) == (Verdict.REFUSE, outcome)


@pytest.mark.parametrize("there", [present(group(A)), present(None, A)])
def test_member_of_another_type_is_refused(there: Present) -> None:
    for protocol_type in ("connect", ""):
        decision = admission(request(NEW, protocol_type=protocol_type), there, may_repeat=True)
        assert decision.outcome is Outcome.PROTOCOL_MISMATCH


# ------------------------------------------------------------------------------------------------- identity
@pytest.mark.parametrize(
    ("who", "generation", "outcome"),
    [
        (Identity(member_id="a"), 3, Outcome.OK),
        (Identity(member_id="a"), None, Outcome.OK),
        (Identity(member_id="a"), 2, Outcome.WRONG_GENERATION),
        (Identity(member_id="x"), 3, Outcome.UNKNOWN_MEMBER),
        (Identity(member_id="w"), None, Outcome.OK),
        (Identity(member_id="w"), 3, Outcome.REBALANCING),
        (Identity(member_id="s", instance_id="i"), 3, Outcome.OK),
        (Identity(member_id="a", instance_id="i"), 2, Outcome.FENCED_INSTANCE),
        (Identity(member_id="s", instance_id="j"), 3, Outcome.UNKNOWN_MEMBER),
    ],
)
def test_sender_is_checked_by_instance_member_and_generation(
    who: Identity, generation: int | None, outcome: Outcome
) -> None:
    found = check_identity(who, generation, members=states(A, S), joiners=waiting(member("w")), current=3)
    assert found is outcome


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        (Identity(member_id="", instance_id="i"), (Outcome.OK, "s")),
        (Identity(member_id="r"), (Outcome.OK, "r")),
        (Identity(member_id="w"), (Outcome.OK, "w")),
        (Identity(member_id="a"), (Outcome.OK, "a")),
        (Identity(member_id="x"), (Outcome.UNKNOWN_MEMBER, "x")),
        (Identity(member_id="", instance_id="j"), (Outcome.UNKNOWN_MEMBER, "")),
    ],
)
def test_member_that_leaves_is_resolved(who: Identity, expected: tuple[Outcome, str]) -> None:
    found = resolve_leaver(who, members=states(A, S), joiners=waiting(member("w")), reserved_ids={"r"})
    assert found == expected


# ------------------------------------------------------------------------------------------------- sessions
def test_member_that_is_new_to_the_coordinator_gets_a_full_session() -> None:
    assert sessions_of(states(A, B), {"a": 7, "gone": 9}, 100) == {"a": 7, "b": 100 + 10_000 * NS_PER_MS}


@pytest.mark.parametrize(
    ("late", "waits", "silent"), [((), (), ["a"]), ((), ("a",), []), (("b",), (), ["a", "b"]), (("b",), ("b",), ["a"])]
)
def test_member_is_gone_when_it_is_silent_or_late_and_does_not_wait(
    late: tuple[str, ...], waits: tuple[str, ...], silent: list[str]
) -> None:
    assert silent_members({"a": 10, "b": 11}, late=late, waiting=waits, now_ns=10) == silent


def test_sessions_are_due_at_the_earliest_end() -> None:
    sessions = Sessions()
    sessions.compute_due((), NEVER_NS)
    assert sessions.due_ns == NEVER_NS
    sessions.follow(states(A, member("b", session_ms=5_000)), 0)
    assert sessions.due_ns == 5 * SECOND_NS
    sessions.compute_due({"b"}, NEVER_NS)
    assert sessions.due_ns == 10 * SECOND_NS, "a member that waits has no end of its session"
    sessions.await_syncs(["a"], 4 * SECOND_NS)
    sessions.reserve_id("r", 3 * SECOND_NS)
    sessions.compute_due((), 2 * SECOND_NS)
    assert sessions.due_ns == 2 * SECOND_NS
    sessions.compute_due((), NEVER_NS)
    assert sessions.due_ns == 3 * SECOND_NS
    sessions.expire_ids(3 * SECOND_NS)
    sessions.compute_due((), NEVER_NS)
    assert (sessions.reserved_ids, sessions.due_ns) == ({}, 4 * SECOND_NS)
    assert sessions.silent((), 4 * SECOND_NS) == ["a"]
    sessions.on_sync("a")
    assert sessions.silent((), 4 * SECOND_NS) == []


# ------------------------------------------------------------------------------------------------- rounds
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
    round_ = Round(until_ns=10, limit_ns=20, is_first=is_first, joiners=waiting(*joiners))
    assert round_end(round_, states(*members), has_reserved_ids=has_reserved_ids, now_ns=now_ns) is end


@pytest.mark.parametrize(
    ("members", "newcomer_ns", "until_ns", "limit_ns", "is_first"),
    [
        ((), 50, 3, 50, True),
        ((), 2, 2, 2, True),
        ((patient(A, 4), patient(B, 6)), 50, 6 * NS_PER_MS, 6 * NS_PER_MS, False),
    ],
)
def test_round_waits(
    members: tuple[GroupMember, ...], newcomer_ns: int, until_ns: int, limit_ns: int, is_first: bool
) -> None:
    found = new_round(states(*members), now_ns=0, initial_delay_ns=3, newcomer_timeout_ns=newcomer_ns)
    assert (found.until_ns, found.limit_ns, found.is_first) == (until_ns, limit_ns, is_first)


def test_first_round_never_waits_beyond_its_limit() -> None:
    round_ = Round(until_ns=10, limit_ns=20, is_first=True)
    round_.wait_longer(5, 8)
    assert round_.until_ns == 13
    round_.wait_longer(13, 8)
    assert round_.until_ns == 20


@pytest.mark.parametrize(
    ("known", "joiners", "leader", "ids"),
    [
        (None, (B, A), "b", ["b", "a"]),
        (group(A, B), (B, A), "a", ["b", "a"]),  # the leader stays
        (group(A, B), (B,), "b", ["b"]),
        (group(A, S), (A,), "a", ["a", "s"]),  # a static member is kept
    ],
)
def test_generation_has_the_joiners_and_the_absent_static_members(
    known: object, joiners: tuple[GroupMember, ...], leader: str, ids: list[str]
) -> None:
    round_ = Round(until_ns=10, limit_ns=20, is_first=False, joiners=waiting(*joiners))
    command = generation_of(round_, known, GROUP, Epoch(4))  # type: ignore[arg-type]  # a GroupState, or None
    assert (command.leader, [m.member_id for m in command.members]) == (leader, ids)
    assert (command.expected_generation, command.protocol) == (0 if known is None else 3, "range")


# ------------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize(
    ("protocol_type", "protocol", "outcome"),
    [
        (None, None, Outcome.OK),
        ("consumer", "range", Outcome.OK),
        ("connect", "range", Outcome.PROTOCOL_MISMATCH),
        ("consumer", "sticky", Outcome.PROTOCOL_MISMATCH),
    ],
)
def test_sync_names_the_generations_protocol_or_none(
    protocol_type: str | None, protocol: str | None, outcome: Outcome
) -> None:
    request = Sync(
        group=GROUP, who=Identity(member_id="a"), generation=3, protocol_type=protocol_type, protocol=protocol
    )
    assert sync_refusal(request, group(A)) is outcome


def test_only_the_leader_sees_the_members() -> None:
    assert joined(group(A, S), "a").members == (("a", "", b"m"), ("s", "i", b"m"))
    assert joined(group(A, S), "s").members == ()


@pytest.mark.parametrize("can_skip", [True, False])
def test_static_member_that_is_back_as_the_leader_computes_no_assignment(can_skip: bool) -> None:
    back = member("s2", instance="i")
    answer = joined_as_former(group(A, back, leader="s2"), back, S, can_skip=can_skip, partition_count=has_two)
    assert answer is not None
    assert (answer.leader, answer.skip_assignment, bool(answer.members)) == (
        ("s2", True, True) if can_skip else ("s", False, False)
    )


@pytest.mark.parametrize(
    ("phase", "metadata", "is_answered"),
    [(STABLE, b"m", True), (STABLE, b"other", False), (SYNCING, b"m", False), (JOINING, b"m", False)],
)
def test_static_member_that_is_back_continues_only_if_nothing_has_changed(
    phase: GroupPhase, metadata: bytes, is_answered: bool
) -> None:
    back = member("s2", instance="i", metadata=metadata)
    answer = joined_as_former(group(A, back, phase=phase), back, S, can_skip=True, partition_count=has_two)
    assert (answer is not None) is is_answered


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
    found = replace(
        group(member("a", metadata=metadata), member("b", metadata=metadata)),
        protocol_type=protocol_type,
        protocol=protocol,
    )
    found.members = {
        name: replace(m, assignment=data) for (name, m), data in zip(found.members.items(), assignments, strict=True)
    }
    assert is_partition_free(found, has_two) is is_free
