"""The planned handover of one partition: stop numbering, let the successor catch up, commit, propose it (rule 11).

Owns the pause: batches that arrive meanwhile are parked, in bounded number for a bounded time. Their producers then
learn the new leader, or the batches are taken after all if the handover fails. Nothing that was appended before is
given up: the successor is proposed only when the high water mark has reached the end of the log, so the new epoch
begins after the last record. It must never append or count by itself. Only the replica uses it.
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
from smq.replication.ports import Buffer

LAG_BYTES_MAX: Final = 4 << 20  # it begins only to a follower this close, to keep the pause short
PAUSE_MS_MAX: Final = 1_000  # a longer one is abandoned, and batches are accepted again
PARKED_MAX: Final = 1_000  # batches; further ones are refused with a retry hint
PARKED_BYTES_MAX: Final = 8 << 20


class Leading(Protocol):
    """What a handover sees of its replica."""

    part: PartitionState
    log: PartitionLog
    leading: Epoch | None

    def stream_to(self, peer: NodeId) -> FollowerStream | None: ...

    def produce(self, batch: Buffer, acks: Acks, timeout_ms: int, limit: int, done: DoneFn[Produced]) -> None: ...

    def not_leader(self) -> SmqError: ...

    def expect(self, batch: Buffer) -> None: ...


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
        self._target: NodeId | None = None
        self._is_proposed = False
        self._parked: deque[_Parked] = deque()
        self._parked_bytes = 0

    @property
    def is_under_way(self) -> bool:
        return self._target is not None

    def begin(self, target: NodeId) -> bool:
        """False if this node does not lead, is already handing over, or the target is not known to be close."""
        replica = self._replica
        stream, epoch = replica.stream_to(target), replica.leading
        if epoch is None or self._target is not None or stream is None or stream.acked_end is None:
            return False
        if stream.acked_end < replica.log.appended_end and (
            stream.lag_bytes is None or stream.lag_bytes > LAG_BYTES_MAX
        ):
            return False
        self._target = target
        at_ns = self._host.clock.monotonic_ns() + PAUSE_MS_MAX * 1_000_000
        self._host.deadlines.add(at_ns, partial(self._abandon, epoch))
        self.drive()
        return True

    def drive(self) -> None:
        """Proposes the target once it has the whole log and the whole log is committed."""
        if self._target is None or self._is_proposed:
            return
        replica = self._replica
        stream, log, epoch = replica.stream_to(self._target), replica.log, replica.leading
        if stream is None or epoch is None or stream.incarnation is None:
            return
        if stream.acked_end == log.appended_end == replica.part.hwm:
            self._is_proposed = True
            command = ElectLeader(
                partition=replica.part.pid,
                expected_epoch=epoch,
                candidate=stream.peer,
                incarnation=stream.incarnation,
                end=stream.acked_end,
            )
            self._host.propose(command, PAUSE_MS_MAX, partial(self._on_result, epoch))

    def _on_result(self, epoch: Epoch, result: Reply | SmqError) -> None:
        if isinstance(result, SmqError):
            self._abandon(epoch)

    def _abandon(self, epoch: Epoch) -> None:
        """Parked batches are taken first, in order, before any new one."""
        if self._replica.leading != epoch or self._target is None:
            return
        self._target = None
        self._is_proposed = False
        for parked in self._drain_parked():
            try:
                self._replica.produce(parked.batch, parked.acks, parked.timeout_ms, parked.limit, parked.done)
            except SmqError as e:
                self._refuse(parked, e)

    def park(self, batch: Buffer, acks: Acks, timeout_ms: int, limit: int, done: DoneFn[Produced]) -> bool:
        """Keeps a producer waiting. False if the bounds are reached."""
        if len(self._parked) >= PARKED_MAX or self._parked_bytes + len(batch) > PARKED_BYTES_MAX:
            return False
        self._parked.append(_Parked(batch, acks, timeout_ms, limit, done))
        self._parked_bytes += len(batch)
        return True

    def end(self, error: Callable[[], SmqError] | None = None) -> None:
        """This process no longer leads. No parked batch has been appended."""
        self._target = None
        self._is_proposed = False
        for parked in self._drain_parked():
            self._refuse(parked, (error or self._replica.not_leader)())

    def _drain_parked(self) -> list[_Parked]:
        parked = list(self._parked)
        self._parked.clear()
        self._parked_bytes = 0
        return parked

    def _refuse(self, parked: _Parked, error: SmqError) -> None:
        if parked.acks is not Acks.NONE:
            self._replica.expect(parked.batch)
        self._host.deliver(lambda: parked.done(error))
