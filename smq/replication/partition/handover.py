"""The planned hand-over of one partition: stop numbering, let the successor catch up, commit, propose it (rule 11).

Owns the pause: producers that come meanwhile are kept waiting, a bounded few for a bounded time, and are then told who
leads, or taken after all where the hand-over came to nothing. Nothing that was appended before is given up: the
successor is proposed only when the high water mark has reached the end of the log, so the new epoch begins behind the
last record. Must never append or count by itself. Used by the replica only.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from smq.raft_state.commands import ElectLeader
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, NodeId
from smq.raft_state.replies import Reply
from smq.raft_state.state import PartitionState
from smq.replication.api import Acks, DoneFn, Produced
from smq.replication.host import Host
from smq.replication.log.store import PartitionLog
from smq.replication.partition.streams import FollowerStream
from smq.replication.ports import Buffer, DataDamaged

LAG_BYTES_MAX: Final = 4 << 20  # it begins only to a follower this near, to keep the pause short
PAUSE_MS_MAX: Final = 1_000  # one that takes longer is given up, and producers are taken on again
PARKED_MAX: Final = 1_000  # producers' batches that wait for the end of it; more are told to come back
PARKED_BYTES_MAX: Final = 8 << 20


class Leading(Protocol):
    """What a hand-over sees of its replica."""

    part: PartitionState
    log: PartitionLog
    leading: Epoch | None

    def stream_to(self, peer: NodeId) -> FollowerStream | None: ...

    def produce(self, batch: Buffer, acks: Acks, timeout_ms: int, limit: int, done: DoneFn[Produced]) -> None: ...

    def not_leader(self) -> SmqError: ...


@dataclass(frozen=True, slots=True)
class _Parked:
    batch: Buffer
    acks: Acks
    timeout_ms: int
    limit: int
    done: DoneFn[Produced]


class HandOver:
    def __init__(self, host: Host, replica: Leading) -> None:
        self._host = host
        self._replica = replica
        self._to: NodeId | None = None
        self._is_proposed = False
        self._parked: deque[_Parked] = deque()
        self._parked_bytes = 0

    @property
    def is_under_way(self) -> bool:
        return self._to is not None

    def begin(self, target: NodeId) -> bool:
        """False where this node does not lead, is at it already, or the target is not known to be near."""
        replica = self._replica
        stream, log, epoch = replica.stream_to(target), replica.log, replica.leading
        if epoch is None or self._to is not None or stream is None or stream.acked_end is None:
            return False
        try:
            lag = log.read(stream.acked_end, log.appended_end, LAG_BYTES_MAX, durable_only=False)
        except DataDamaged:
            return False
        if lag and lag[-1].end < log.appended_end:
            return False
        self._to = target
        at_ns = self._host.clock.monotonic_ns() + PAUSE_MS_MAX * 1_000_000
        self._host.deadlines.add(at_ns, partial(self._give_up, epoch))
        self.drive()
        return True

    def drive(self) -> None:
        """Proposes the target once it has everything and everything is committed."""
        if self._to is None or self._is_proposed:
            return
        replica = self._replica
        stream, log, epoch = replica.stream_to(self._to), replica.log, replica.leading
        if stream is None or epoch is None or stream.incarnation is None:
            return
        if stream.acked_end == log.appended_end == replica.part.hwm:
            self._is_proposed = True
            command = ElectLeader(
                partition=replica.part.pid,
                expected_epoch=epoch,
                candidate=stream.peer,
                incarnation=stream.incarnation,
                verified_end=stream.acked_end,
            )
            self._host.propose(command, PAUSE_MS_MAX, partial(self._on_result, epoch))

    def _on_result(self, epoch: Epoch, result: Reply | SmqError) -> None:
        if isinstance(result, SmqError):
            self._give_up(epoch)

    def _give_up(self, epoch: Epoch) -> None:
        """Who waited is taken first, in order, before anybody new."""
        if self._replica.leading != epoch or self._to is None:
            return
        self._to = None
        self._is_proposed = False
        for waiting in self._take_parked():
            try:
                self._replica.produce(waiting.batch, waiting.acks, waiting.timeout_ms, waiting.limit, waiting.done)
            except SmqError as e:
                self._tell(waiting.done, e)

    def park(self, batch: Buffer, acks: Acks, timeout_ms: int, limit: int, done: DoneFn[Produced]) -> bool:
        """Keeps a producer waiting. False where there is no more room."""
        if len(self._parked) >= PARKED_MAX or self._parked_bytes + len(batch) > PARKED_BYTES_MAX:
            return False
        self._parked.append(_Parked(batch, acks, timeout_ms, limit, done))
        self._parked_bytes += len(batch)
        return True

    def end(self, error: Callable[[], SmqError] | None = None) -> None:
        """This process does not lead any more. Nothing of what waited has been appended."""
        self._to = None
        self._is_proposed = False
        for waiting in self._take_parked():
            self._tell(waiting.done, (error or self._replica.not_leader)())

    def _take_parked(self) -> list[_Parked]:
        parked = list(self._parked)
        self._parked.clear()
        self._parked_bytes = 0
        return parked

    def _tell(self, done: DoneFn[Produced], error: SmqError) -> None:
        self._host.deliver(lambda: done(error))
