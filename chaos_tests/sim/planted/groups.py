"""Planted bugs of groups: their coordinators, their members, the fence around their changes, and their lag.

Owns these rows only. `catalogue` alone imports it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from chaos_tests.sim.replacement import Fault, PlantedBug, replace, returns
from smq.coordinator.groups.consumers import LiveConsumers
from smq.coordinator.service.group_lag import GroupPosition, Lag
from smq.raft_state.commands import Acknowledgement, CommitOffsets, Coordinated, StageOffsets
from smq.raft_state.ids import Generation, Offset
from smq.raft_state.replies import Applied
from smq.raft_state.state import ClusterState, GroupKind, GroupState, MemberState
from smq.replication.commands.proposer import Proposer

_HANDLERS: Final = "smq.raft_state.handlers."
_CONSUMERS: Final = "smq.coordinator.groups.consumers:LiveConsumers."
_SESSIONS: Final = "smq.coordinator.groups.session_timeouts:"


def _of_any_generation(original: Fault, group: GroupState | None, command: CommitOffsets | StageOffsets) -> None:
    if group is not None:
        command = dataclasses.replace(command, generation=group.generation)
    original(group, command)


def _of_any_epoch(original: Fault, group: GroupState | None, command: CommitOffsets | StageOffsets) -> None:
    if group is not None and group.kind is GroupKind.CONSUMER and command.member_id in group.members:
        command = dataclasses.replace(command, generation=Generation(group.members[command.member_id].epoch))
    original(group, command)


def _nobody_owns(original: Fault, group: GroupState, member: MemberState, said: Acknowledgement) -> Any:
    return original(dataclasses.replace(group, owners={}), member, said)


def _silence_is_consent(original: Fault, group: GroupState, member: MemberState, said: Acknowledgement) -> Any:
    return original(group, member, said if said.says_owned else dataclasses.replace(said, owned=(), says_owned=True))


def _no_fresh_session(original: Fault, live: LiveConsumers) -> Any:
    known = set(live._ends_ns)
    group = original(live)
    new = live._ends_ns.keys() - known
    live._ends_ns.update(dict.fromkeys(new, live._now_ns))
    live._wake_at(live._now_ns)
    return group


def _over_already(original: Fault, members: Mapping[str, Any], before: Mapping[str, int], now_ns: int) -> Any:
    return original(members, {name: before.get(name, now_ns) for name in members}, now_ns)


def _of_no_member_only(original: Fault, state: ClusterState, command: Coordinated) -> None:
    if not getattr(command, "member_id", ""):
        original(state, command)


def _whenever(original: Fault, proposer: Proposer, pending: Any) -> None:
    pending.send_until_ns = 1 << 62
    original(proposer, pending)


def _begins_at_zero(original: Fault, state: ClusterState, name: str) -> GroupState:
    group: GroupState = original(state, name)
    group.generation, group.changes = Generation(0), 0
    return group


def _none_without_the_group(_original: Fault, state: ClusterState, name: str) -> int:
    return state.groups[name].changes if name in state.groups else 0


def _the_last_record_read(original: Fault, state: ClusterState, command: CommitOffsets) -> Applied:
    items = tuple(dataclasses.replace(item, offset=Offset(max(item.offset - 1, 0))) for item in command.items)
    applied: Applied = original(state, dataclasses.replace(command, items=items))
    return applied


def _counts_removed_records(original: Fault, at: GroupPosition, log_start: Offset, end: Offset) -> Lag:
    first = max(at.unread_from(log_start), log_start)
    lag: Lag = dataclasses.replace(original(at, log_start, end), records=max(0, end - first))
    return lag


GROUP_BUGS: Final = (
    PlantedBug(
        name="commit-of-another-generation",
        rule="every commit of a member is fenced by its generation",
        faults=(replace(_HANDLERS + "groups:check_committer", by=_of_any_generation),),
        scenario="groups",
        anomalies=frozenset({"stale-generation"}),
    ),
    PlantedBug(
        name="new-coordinator-evicts-at-once",
        rule="a new coordinator gives each member one fresh session",
        faults=(replace(_SESSIONS + "sessions_of", by=_over_already),),
        scenario="groups",
        anomalies=frozenset({"evicted-alive"}),
        seeds=5,
    ),
    PlantedBug(
        name="sessions-never-end",
        rule="silent members are evicted",
        faults=(replace(_SESSIONS + "silent_members", by=returns([])),),
        scenario="groups",
        anomalies=frozenset({"phantom-member"}),
    ),
    PlantedBug(
        name="partition-given-before-it-is-free",
        rule="a member of a consumer group gets a partition once no other has it",
        faults=(replace(_HANDLERS + "consumers:reconciled", by=_nobody_owns),),
        scenario="consumer_groups",
        anomalies=frozenset({"shared-partition"}),
    ),
    PlantedBug(
        name="silence-taken-for-given-up",
        rule="what a member of a consumer group is to give up is free once it says that it has given it up",
        faults=(replace(_HANDLERS + "consumers:reconciled", by=_silence_is_consent),),
        scenario="consumer_groups",
        anomalies=frozenset({"shared-partition"}),
    ),
    PlantedBug(
        name="commit-of-another-member-epoch",
        rule="every commit of a consumer group's member is fenced by its epoch",
        faults=(replace(_HANDLERS + "groups:check_committer", by=_of_any_epoch),),
        scenario="consumer_groups",
        anomalies=frozenset({"stale-generation"}),
    ),
    PlantedBug(
        name="consumers-sessions-never-end",
        rule="silent members of a consumer group are removed, and those that do not give up in time",
        faults=(replace(_CONSUMERS + "on_time", by=returns(None)),),
        scenario="consumer_groups",
        anomalies=frozenset({"phantom-member", "ownerless"}),
    ),
    PlantedBug(
        name="new-coordinator-removes-consumers-at-once",
        rule="a new coordinator gives each member of a consumer group one fresh session",
        faults=(replace(_CONSUMERS + "_refresh", by=_no_fresh_session),),
        scenario="consumer_groups",
        anomalies=frozenset({"evicted-alive"}),
    ),
    PlantedBug(
        name="answer-taken-for-heard",
        rule="a member of a consumer group that says everything learns everything",
        faults=(replace("smq.coordinator.groups.member_requests:Beat.is_full", by=returns(False)),),
        seeds=30,
        scenario="consumer_groups",
        anomalies=frozenset({"wrong-assignment"}),
    ),
    PlantedBug(
        name="former-coordinator-commits",
        rule="a member's commit names its coordinator's epoch: a late one does not overwrite a newer one (P6)",
        faults=(replace(_HANDLERS + "fencing:check_fence", by=_of_no_member_only),),
        scenario="late_commits",
        anomalies=frozenset({"stale-commit", "commit-regression"}),
        seeds=12,
    ),
    PlantedBug(
        name="proposer-sends-again-after-the-deadline",
        rule="nothing is proposed after its caller's deadline",
        faults=(replace("smq.replication.commands.proposer:Proposer._attempt", by=_whenever),),
        scenario="groups",
        anomalies=frozenset({"late-proposal"}),
    ),
    PlantedBug(
        name="generations-start-over",
        rule="a group that is formed again counts on, so that no command for the former one fits it",
        faults=(
            replace(_HANDLERS + "groups:make_group", by=_begins_at_zero),
            replace(_HANDLERS + "fencing:changes_of", by=_none_without_the_group),
        ),
        scenario="groups",
        anomalies=frozenset({"split-generation"}),
        seeds=5,
    ),
    PlantedBug(
        name="commit-of-the-last-record-read",
        rule="a group's committed offset is that of its last commit (P6)",
        faults=(replace(_HANDLERS + "groups:_commit_items", by=_the_last_record_read),),
        scenario="groups",
        anomalies=frozenset({"watched-commit-changed"}),
    ),
    PlantedBug(
        name="lag-counts-removed-records",
        rule="lag: records are what can still be read; where compaction has been, their number is not known",
        faults=(replace("smq.coordinator.service.group_lag:counted", by=_counts_removed_records),),
        scenario="lag+compaction",
        anomalies=frozenset({"wrong-lag"}),
    ),
)
