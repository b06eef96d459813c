"""The bound of the replicated state: beyond it, a node refuses to propose what would add to it.

A node that lacks journal entries gets the whole state in one snapshot, and takes none above SNAPSHOT_BYTES_MAX. So what
users may add without another bound ends at half of that: the offsets that groups commit, with their metadata, new
groups and topics. Everything else goes on: deletions, commits that are no larger than those before them, elections,
members, transactions. All of these have bounds of their own, which fit the other half.

Owns the size, as of this node's newest snapshot, less what deletions have freed since. A proposer's refusal is no
outcome of a command, so nodes need not agree on it, nor know it. It must never refuse a request that has run already.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from smq.raft_state.commands import (
    AddPartitions,
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    FormGeneration,
    OffsetCommit,
    Request,
    StageOffsets,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, PartitionId
from smq.raft_state.limits import TOPIC_ID_BYTES
from smq.raft_state.remembered import cache_of
from smq.raft_state.state import ClusterState, CommittedOffset
from smq.replication.raft.messages import SNAPSHOT_BYTES_MAX

STATE_BYTES_MAX: Final = SNAPSHOT_BYTES_MAX // 2
_WARNED_SHARE: Final = 0.8  # of it: time to act before anything is refused
_COMMIT_BYTES: Final = 42  # of a committed offset in a snapshot, without its metadata
_NOTHING: Final[Mapping[PartitionId, CommittedOffset]] = {}


class StateQuota:
    def __init__(self, snapshot: Callable[[], tuple[LogIndex, int]]) -> None:
        """`snapshot`: the index and size of this node's newest one."""
        self._snapshot = snapshot
        self._freed = (LogIndex(0), 0)  # the snapshot that it was counted from, bytes

    @property
    def size(self) -> int:
        """Of the state, about. What was added since the snapshot is missing: it was at most some 64 MiB of entries."""
        index, size = self._snapshot()
        return size - self._freed_since(index)

    @property
    def is_full(self) -> bool:
        return self.size >= STATE_BYTES_MAX

    def refusal(self, state: ClusterState, command: Command) -> SmqError | None:
        if not self.is_full or not _adds(state, command):
            return None
        if isinstance(command, Request) and command.request_id in cache_of(state, command).replies:
            return None
        return SmqError(ErrorCode.LIMIT_EXCEEDED, self._text())

    def warnings(self) -> list[str]:
        return [self._text()] if self.size >= _WARNED_SHARE * STATE_BYTES_MAX else []

    def _text(self) -> str:
        return (
            f"the replicated state has {self.size >> 20} MiB, its bound is {STATE_BYTES_MAX >> 20} MiB: delete groups,"
            " committed offsets or topics that are not needed, or commit less metadata. At the bound, new topics,"
            " partitions and groups are refused, and commits that are larger than those before them"
        )

    # ------------------------------------------------------------------------------------------------ deletions
    def freed_by(self, state: ClusterState, command: Command) -> int:
        """What a deletion will free, before it is applied. Counted while the state is full only: it takes a look at
        each committed offset."""
        if not isinstance(command, DeleteGroup | DeleteOffsets | DeleteTopic) or not self.is_full:
            return 0
        return _size_of(_deleted(state, command))

    def note_freed(self, size: int) -> None:
        index, _ = self._snapshot()
        self._freed = index, self._freed_since(index) + size

    def _freed_since(self, index: LogIndex) -> int:
        since, freed = self._freed
        return freed if since == index else 0


def _adds(state: ClusterState, command: Command) -> bool:
    match command:
        case CreateTopic() | AddPartitions():
            return True
        case FormGeneration():
            return command.group not in state.groups
        case CommitOffsets() | StageOffsets():
            known = _offsets_of(state, command.group)
            return any(_is_larger(item, known.get(item.partition)) for item in command.items)
    return False


def _is_larger(item: OffsetCommit, known: CommittedOffset | None) -> bool:
    return known is None or len(item.metadata.encode()) > len(known.metadata.encode())


def _deleted(state: ClusterState, command: DeleteGroup | DeleteOffsets | DeleteTopic) -> Iterable[CommittedOffset]:
    match command:
        case DeleteGroup():
            return _offsets_of(state, command.group).values()
        case DeleteOffsets():
            known = _offsets_of(state, command.group)
            return [known[pid] for pid in set(command.partitions) if pid in known]
        case DeleteTopic():
            topic = state.topics.get(command.name)
            if topic is None:
                return ()
            groups = state.groups.values()
            return [c for g in groups for pid, c in g.offsets.items() if pid[:TOPIC_ID_BYTES] == topic.topic_id]


def _size_of(offsets: Iterable[CommittedOffset]) -> int:
    return sum(_COMMIT_BYTES + len(committed.metadata.encode()) for committed in offsets)


def _offsets_of(state: ClusterState, group: str) -> Mapping[PartitionId, CommittedOffset]:
    found = state.groups.get(group)
    return found.offsets if found is not None else _NOTHING
