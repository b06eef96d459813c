"""Handler of CommitOffsets: what each group has committed.

Owns the groups' committed offsets. A group exists while it has any; it is made by its first commit and vanishes with
the last topic it committed for. Only `machine` and `topics` import it.
"""

from smq.raft_state.commands import Applied, CommitOffsets, Done, OffsetCommit
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import PartitionId, TopicId
from smq.raft_state.limits import COMMIT_ITEMS_MAX, GROUP_NAME_BYTES_MAX, METADATA_BYTES_MAX, OFFSET_MAX, TOPIC_ID_BYTES
from smq.raft_state.refusal import Refused, find_partition, quoted
from smq.raft_state.state import ClusterState, CommittedOffset, GroupState


def commit_offsets(state: ClusterState, command: CommitOffsets) -> Applied:
    """All items or none. A commit of nothing is fine and makes no group."""
    _check_group_name(command.group)
    if len(command.items) > COMMIT_ITEMS_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"{len(command.items)} offsets in one commit, at most {COMMIT_ITEMS_MAX}"
        )
    seen: set[PartitionId] = set()  # only asked for membership: its order is never seen
    for item in command.items:
        _check_item(state, item)
        if item.partition in seen:
            raise Refused(ErrorCode.INVALID_REQUEST, "items name the same partition twice")
        seen.add(item.partition)
    if not command.items:
        return Applied(reply=Done())
    group = state.groups.get(command.group)
    if group is None:
        if len(state.groups) >= state.groups_max:
            raise Refused(ErrorCode.LIMIT_EXCEEDED, f"there are {len(state.groups)} groups, the limit (groups_max)")
        group = state.groups[command.group] = GroupState(name=command.group)
    for item in command.items:
        group.offsets[item.partition] = CommittedOffset(
            offset=item.offset, metadata=item.metadata, committed_ms=command.committed_ms
        )
    return Applied(reply=Done())


def forget_topic(state: ClusterState, topic_id: TopicId) -> None:
    """Drops what was committed for a topic that is deleted, and groups that are left with nothing."""
    for name, group in list(state.groups.items()):
        for pid in [pid for pid in group.offsets if pid[:TOPIC_ID_BYTES] == topic_id]:
            del group.offsets[pid]
        if not group.offsets:
            del state.groups[name]


def _check_group_name(name: str) -> None:
    # Not str.isprintable(): it follows the Unicode tables of the Python at hand, and nodes may differ in that.
    if not 1 <= len(name.encode()) <= GROUP_NAME_BYTES_MAX or any(c < " " or c == "\x7f" for c in name):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"group must have 1 to {GROUP_NAME_BYTES_MAX} bytes without control characters, not {quoted(name)}",
        )


def _check_item(state: ClusterState, item: OffsetCommit) -> None:
    find_partition(state, item.partition)
    if not 0 <= item.offset <= OFFSET_MAX:
        raise Refused(ErrorCode.INVALID_OFFSET, f"a committed offset must be from 0 to {OFFSET_MAX}, not {item.offset}")
    if len(item.metadata.encode()) > METADATA_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"metadata must have at most {METADATA_BYTES_MAX} bytes")
