"""What only a bug, a disk that has lied, or a hand in the data explains: looked for while the node works.

Owns the kinds, their count, the latest of them, and the comparisons behind most: of a partition's positions, of what
groups have committed, of the replicated state with that of other nodes. (A leader compares the ends of logs where it
learns of them, in `partition.streams`.) They are what the judges of the simulation look for, as far as one node sees it
by itself and a comparison shows it. It must never change or decide anything: a node that finds an anomaly goes on,
because the other nodes would find the same, and none would be left. Any part of the node may note one.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import structlog

from smq.raft_state.commands import Command, CommitOffsets, EndTransaction
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset, PartitionId
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.ports import Clock

_log = structlog.get_logger("smq.anomalies")

KEPT: Final = 100  # the latest ones, for the console
LOG_EVERY_NS: Final = 1_000_000_000  # one line of each kind: one cause may show in thousands of partitions
COMMITS_MAX: Final = 10_000  # pairs of group and partition whose last commit is remembered: a few MB
DIGESTS_KEPT: Final = 4  # a node that is further behind is compared at a later one
DIGEST_BYTES: Final = 8  # of SHA-256: against bugs, not against attackers


class Kind(enum.StrEnum):
    """The values of the metric's label."""

    HWM_BACK = "hwm-back"
    LOG_START_BACK = "log-start-back"
    LSO_BACK = "lso-back"
    COMMIT_CHANGED = "commit-changed"
    STATE_DIFFERS = "state-differs"
    LOG_DIFFERS = "log-differs"
    OTHER_BIRTH = "other-birth"


class Anomaly(NamedTuple):
    """`number` counts the anomalies of this process, from 1."""

    number: int
    at_ns: int  # wall clock
    kind: Kind
    text: str


class Anomalies:
    """Of one process. Every kind is counted from the start, so that its first occurrence is an increase."""

    def __init__(self, clock: Clock, measures: NodeMeasures, state: Callable[[], ClusterState]) -> None:
        """`state`: for the names of partitions only."""
        self._clock = clock
        self._counter = measures.anomalies
        self._state = state
        for kind in Kind:
            self._counter.add(0, kind)
        self.recent: deque[Anomaly] = deque(maxlen=KEPT)
        self._number = 0
        self._logged_ns: dict[Kind, int] = {}

    def note(self, kind: Kind, text: str) -> None:
        self._number += 1
        self._counter.add(1, kind)
        self.recent.append(Anomaly(self._number, self._clock.wall_ns(), kind, text))
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._logged_ns.get(kind, -LOG_EVERY_NS) >= LOG_EVERY_NS:
            self._logged_ns[kind] = now_ns
            _log.error("anomaly: see SmqAnomaly in the runbook", kind=kind.value, what=text, number=self._number)

    def name(self, pid: PartitionId) -> str:
        """Of a partition, for a text."""
        part = self._state().partition(pid)
        return f"{self._state().topic_names[part.topic_id]}/{part.index}" if part is not None else pid.hex()


class PositionWatch:
    """The high water mark, the log start and the last stable offset of one partition on this node: none may go back."""

    __slots__ = ("_anomalies", "_hwm", "_log_start", "_pid", "lso")

    def __init__(self, anomalies: Anomalies, pid: PartitionId) -> None:
        self._anomalies = anomalies
        self._pid = pid
        self._hwm = self._log_start = self.lso = Offset(0)

    def applied(self, part: PartitionState) -> None:
        """The replicated state of the partition may have moved."""
        if part.hwm < self._hwm:
            self._note(Kind.HWM_BACK, f"its high water mark was {self._hwm}, and is {part.hwm}")
        if part.log_start < self._log_start:
            self._note(Kind.LOG_START_BACK, f"its log start was {self._log_start}, and is {part.log_start}")
        self._hwm, self._log_start = part.hwm, part.log_start

    def begins(self, epoch: Epoch, start: Offset, committed: Offset) -> None:
        """A new epoch keeps what is below `start`. This process had known everything below `committed` to be committed,
        and may have answered readers and producers by it."""
        if start < max(self._hwm, committed):
            known = max(self._hwm, committed)
            self._note(Kind.HWM_BACK, f"epoch {epoch} starts at {start}, {known} had been known as committed")

    def stable(self, end: Offset) -> None:
        """The leader says that this is the last stable offset (rule 30)."""
        if end < self.lso:
            self._note(Kind.LSO_BACK, f"its last stable offset was {self.lso}, and is {end}")
        self.lso = end

    def _note(self, kind: Kind, text: str) -> None:
        self._anomalies.note(kind, f"{self._anomalies.name(self._pid)}: {text}")


Watched: TypeAlias = tuple[CommitOffsets | EndTransaction, int, tuple[tuple[str, PartitionId], ...]]


class CommitWatch:
    """What groups have committed: it changes by an entry that says so, and is then what the entry says. Any offset may
    follow any other, since clients and operators go back; deletion and expiry may take it away."""

    def __init__(self, anomalies: Anomalies) -> None:
        self._anomalies = anomalies
        self._last: OrderedDict[tuple[str, PartitionId], Offset] = OrderedDict()

    def before(self, state: ClusterState, command: Command) -> Watched | None:
        """For `after`, when the command has been applied. None if it is none that commits offsets."""
        if isinstance(command, EndTransaction):
            transaction = state.transactions.get(command.transactional_id)
            staged = transaction.offsets if transaction is not None else {}
            return command, 0, tuple((group, pid) for group, offsets in staged.items() for pid in offsets)
        if not isinstance(command, CommitOffsets):
            return None
        pairs = tuple((command.group, item.partition) for item in command.items)
        for pair in pairs:
            last, now = self._last.get(pair), _committed(state, pair)
            if last is not None and now is not None and now != last:
                self._note(pair, f"its last commit was {last}, and {now} is there without a commit")
        return command, _changes(state, command.group), pairs

    def after(self, state: ClusterState, watched: Watched) -> None:
        command, changes, pairs = watched
        # A repeated command gets its first reply again, and changes nothing.
        if isinstance(command, CommitOffsets) and _changes(state, command.group) > changes:
            for pair, item in zip(pairs, command.items, strict=True):
                if _committed(state, pair) != item.offset:
                    self._note(pair, f"{item.offset} was committed, and {_committed(state, pair)} is there")
        for pair in pairs:
            self._last.pop(pair, None)
            now = _committed(state, pair)
            if now is not None:
                self._last[pair] = now
        while len(self._last) > COMMITS_MAX:
            self._last.popitem(last=False)

    def forget(self) -> None:
        """The whole state is replaced: entries that this node has not seen have moved it."""
        self._last.clear()

    def _note(self, pair: tuple[str, PartitionId], text: str) -> None:
        group, pid = pair
        self._anomalies.note(Kind.COMMIT_CHANGED, f"group {group!r}, {self._anomalies.name(pid)}: {text}")


def _committed(state: ClusterState, pair: tuple[str, PartitionId]) -> Offset | None:
    group = state.groups.get(pair[0])
    found = group.offsets.get(pair[1]) if group is not None else None
    return found.offset if found is not None else None


def _changes(state: ClusterState, name: str) -> int:
    group = state.groups.get(name)
    return group.changes if group is not None else -1


class StateWatch:
    """The digests of the replicated state at every so many entries: nodes that have applied the same entries have the
    same. The heartbeats of a node carry its latest one."""

    def __init__(self, anomalies: Anomalies) -> None:
        self._anomalies = anomalies
        self._own: OrderedDict[LogIndex, bytes] = OrderedDict()
        self._differed: dict[NodeId, LogIndex] = {}  # the last one of each peer that differed
        self.latest = (LogIndex(0), bytes(DIGEST_BYTES))

    def computed(self, found: tuple[LogIndex, str] | SmqError) -> None:
        """This node's own. An error means that it is stopping, or that too many others wait for a digest."""
        if isinstance(found, SmqError):
            return
        index, digest = found[0], bytes.fromhex(found[1])[:DIGEST_BYTES]
        self._own[index] = digest
        self.latest = index, digest
        while len(self._own) > DIGESTS_KEPT:
            self._own.popitem(last=False)

    def heard(self, peer: NodeId, index: LogIndex, digest: bytes) -> None:
        """The peer's latest one: again and again until it has the next, so this node may compute its own meanwhile."""
        own = self._own.get(index, digest)
        if own != digest and self._differed.get(peer) != index:
            self._differed[peer] = index
            text = f"after entry {index}, the replicated state of node {peer} has digest {digest.hex()}, this node's"
            self._anomalies.note(Kind.STATE_DIFFERS, f"{text} {own.hex()}")
