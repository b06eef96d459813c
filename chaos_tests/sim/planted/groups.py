"""Planted bugs of groups: their coordinators, their members, the fence around their changes, and their lag.

Owns these rows only. `catalogue` alone imports it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from chaos_tests.sim.replacement import Fault, PlantedBug, replace, returns
from smq.coordinator.service.group_lag import GroupPosition, Lag
from smq.raft_state.commands import CommitOffsets, Coordinated, StageOffsets
from smq.raft_state.ids import Generation, Offset
from smq.raft_state.replies import Applied
from smq.raft_state.state import ClusterState, GroupState
from smq.replication.commands.proposer import Proposer

_HANDLERS: Final = "smq.raft_state.handlers."
_SESSIONS: Final = "smq.coordinator.groups.session_timeouts:"


def _of_any_generation(original: Fault, group: GroupState | None, command: CommitOffsets | StageOffsets) -> None:
    if group is not None:
        command = dataclasses.replace(command, generation=group.generation)
    original(group, command)


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
