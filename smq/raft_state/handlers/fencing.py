"""The fence around a group or a transactional id: which changes of it still count.

Owns the two numbers by which a late command is recognized. Each change names the epoch of the coordinator that
proposed it, and how often its subject had been changed by then. A change of a former coordinator has a former epoch. A
change whose caller has given up, and which arrives after a later change, has a former count. Neither takes effect. A
refusal by the fence is no answer to the caller's request: it is not remembered under the request's id (see `machine`).
Only `machine`, the handlers, and who proposes such changes import it.
"""

from typing import Final

from smq.raft_state.commands import Coordinated, TransactionChange
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.state import ClusterState, GroupState

FENCED: Final = ErrorCode.NOT_COORDINATOR  # no handler refuses with this code


def changes_of(state: ClusterState, group: str) -> int:
    """How often the group has been changed. A group that does not exist has the count of the most changed one that was
    deleted, so that no late change of a deleted group takes effect."""
    found = state.groups.get(group)
    return found.changes if found is not None else state.changes_floor


def changes_before(state: ClusterState, command: Coordinated) -> int:
    """How often the subject of the command has been changed."""
    if not isinstance(command, TransactionChange):
        return changes_of(state, command.subject)
    found = state.transactions.get(command.transactional_id)
    return found.changes if found is not None else state.transaction_changes_floor


def check_fence(state: ClusterState, command: Coordinated) -> None:
    """NOT_COORDINATOR if another coordinator, or a later change, has overtaken the command."""
    slot = coordinator_of(state, command.subject)
    what = "transactional id" if isinstance(command, TransactionChange) else "group"
    if slot.epoch != command.coordinator_epoch or not slot.node:
        raise Refused(
            FENCED,
            f"{what} {quoted(command.subject)} is coordinated by node {slot.node} in epoch {slot.epoch},"
            f" not in {command.coordinator_epoch}",
        )
    changes = changes_before(state, command)
    if changes != command.changes_seen:
        raise Refused(
            FENCED, f"{what} {quoted(command.subject)} has changed {changes} times, not {command.changes_seen}"
        )


def count_change(state: ClusterState, command: Coordinated) -> None:
    """After a change has taken effect."""
    if isinstance(command, TransactionChange):
        transaction = state.transactions.get(command.transactional_id)
        if transaction is not None:
            transaction.changes += 1
        return
    group = state.groups.get(command.subject)
    if group is not None:
        group.changes += 1


def leave_floor(state: ClusterState, group: GroupState) -> None:
    """The group is deleted: no change that was proposed before fits a new one of its name."""
    state.changes_floor = max(state.changes_floor, group.changes + 1)
