"""The replicated state of this node, everything that follows a change of it, and its digest.

Owns the machine, the index of the last entry that it holds, and the order of what follows an entry: the part that its
command's row names is woken, the replicas follow, then the waiting proposals are answered. No proposal is answered
before the replicas have followed its entry. It must never know what a command does: the row names the part that it
concerns. Raft drives it; the parts of the node only read `state`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Final, Protocol, TypeAlias

from smq.raft_state.command_codec import decode_command
from smq.raft_state.command_table import ROW_OF, Concern
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import DiskId, LogIndex, NodeId, PartitionId
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied
from smq.replication.commands.proposer import Proposer
from smq.replication.monitoring.anomalies import CommitWatch, StateWatch
from smq.replication.ports import Clock

PIECES_PER_STEP: Final = 4  # of the snapshot: some two milliseconds
WAITING_MAX: Final = 1_000  # callers of one digest; further ones are refused
_RETRY: Final = ErrorDetails(retry_after_ms=200)

DigestDone: TypeAlias = Callable[[tuple[LogIndex, str] | SmqError], None]


class Digests:
    """The digest of the replicated state at one index, computed in steps. `pieces` begins the snapshot of the present
    state, which is at `index`.

    If an entry moves the state meanwhile, it starts again, and the node lets no further entry in until it is done
    (`holds_state`). It never holds the state back for ever: its steps follow each other by themselves."""

    def __init__(self, clock: Clock, pieces: Callable[[], Iterator[bytes]], index: Callable[[], LogIndex]) -> None:
        self._clock = clock
        self._make_pieces = pieces
        self._index = index
        self._pieces: Iterator[bytes] | None = None
        self._sum = sha256()
        self._waiting: list[DigestDone] = []
        self.holds_state = False

    def request(self, done: DigestDone) -> None:
        """`done` gets the digest and its index, which is no older than the state's at this call."""
        if len(self._waiting) >= WAITING_MAX:
            done(SmqError(ErrorCode.OVERLOADED, f"{WAITING_MAX} other callers wait for the digest", _RETRY))
            return
        self._waiting.append(done)
        if self._pieces is None:
            self._begin()
            self._clock.call_soon(self._step)

    def request_here(self, done: DigestDone) -> None:
        """Of the state as it is at this call: no entry is let in until the digest is done."""
        self.request(done)
        self.holds_state = self._pieces is not None

    def on_state_moved(self) -> None:
        if self._pieces is not None:
            self._begin()
            self.holds_state = True

    def close(self, error: SmqError) -> None:
        self._pieces = None
        self._end(error)

    def _begin(self) -> None:
        self._pieces, self._sum = self._make_pieces(), sha256()

    def _step(self) -> None:
        if self._pieces is None:
            return
        for _ in range(PIECES_PER_STEP):
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                self._end((self._index(), self._sum.hexdigest()))
                return
            self._sum.update(piece)
        self._clock.call_soon(self._step)

    def _end(self, result: tuple[LogIndex, str] | SmqError) -> None:
        self.holds_state = False
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            self._clock.call_soon(partial(done, result))


class Followers(Protocol):
    """The replicas, which are above this room: they follow the state, a few milliseconds' work at a time."""

    def touch(self, pids: Iterable[PartitionId]) -> None: ...

    def touch_all(self, *, is_own_disk: bool) -> None: ...

    def follow(self) -> bool:
        """Whether none is left to follow."""


class AppliedState:
    """Implements the StateMachine port."""

    _replicas: Followers
    _proposer: Proposer
    _wake: Mapping[Concern, Callable[[], None]]
    _commits: CommitWatch
    _states: StateWatch

    def __init__(self, clock: Clock, known_level: int) -> None:
        """`known_level`: the highest feature level that this node knows."""
        self._known_level = known_level
        self._machine = Machine(known_level=known_level)
        self.state = self._machine.state  # an attribute: it is read several times for every batch
        self.index = LogIndex(0)  # in the state; the engine calls an entry applied only once this node has followed it
        self.digests = Digests(clock, self.snapshot, lambda: self.index)

    def connect(self, replicas: Followers, proposer: Proposer, wake: Mapping[Concern, Callable[[], None]]) -> None:
        """To the parts that follow the state, all concerns among them. They read it too, so they are made after it."""
        self._replicas, self._proposer, self._wake = replicas, proposer, wake

    def watch(self, commits: CommitWatch, states: StateWatch, digest_entries: int) -> None:
        """Has a digest taken after every so many entries; 0: never."""
        self._commits, self._states, self._digest_entries = commits, states, digest_entries

    def registered_disk(self, node: NodeId) -> DiskId | None:
        known = self.state.nodes.get(node)
        return known.disk if known is not None else None

    # ---------------------------------------------------------------------------------------- StateMachine
    def apply(self, index: LogIndex, command: bytes) -> Applied:
        decoded = decode_command(command, self._known_level)
        watched = self._commits.before(self.state, decoded)
        applied = self._machine.apply(index, decoded)
        if watched is not None:
            self._commits.after(self.state, watched)
        if (concern := ROW_OF[type(decoded)].concern) is not None:
            self._wake[concern]()
        self.index = index
        self.digests.on_state_moved()
        if self._digest_entries > 0 and index % self._digest_entries == 0:
            self.digests.request_here(self._states.computed)
        self._replicas.touch(applied.touched)
        return applied

    def pass_over(self, index: LogIndex) -> None:
        self.index = index

    def settle(self) -> bool:
        """Also holds the next entry back while a digest is computed that the last one has disturbed."""
        if not self._replicas.follow() or self.digests.holds_state:
            return False
        self._proposer.on_applied(self.index)
        return True

    def snapshot(self) -> Iterator[bytes]:
        return self._machine.snapshot_pieces()

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        """The new state replaces the old one in one step. Until a replica is settled, it continues with the old record
        of its partition, as on a node that lags. No barrier ends before all replicas are settled. The first state of a
        process comes from its own disk."""
        is_own = not self.index
        self._machine = yield from Machine.restoring(snapshot, self._known_level)
        self.state = self._machine.state
        self.index = index
        self._commits.forget()
        self.digests.on_state_moved()
        self._replicas.touch_all(is_own_disk=is_own)
        self._wake[Concern.BIRTH]()
        self._wake[Concern.ELECTIONS]()
        while not self._replicas.follow():
            yield
        self._proposer.on_applied(index)
