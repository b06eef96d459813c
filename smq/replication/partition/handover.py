"""The end of an epoch by its leader's own word (rule 26): a planned hand-over to a follower, or a renewal.

Stop numbering, let the successor have everything, propose it. Owns the pause: batches that arrive meanwhile are parked,
in bounded number for a bounded time. Their producers then learn the new leader, or the batches are taken after all if
the hand-over ends before it was proposed. Once a successor has been proposed, nothing is appended in this epoch any
more, because the proposal may be applied whenever. If it fails, the leader proposes itself; if that fails, it resigns.

Owns also when a leader gives its partition up because of its own disk (`step_aside`): damaged, full or hung. Each
condition compares this disk with what followers have reported of theirs, so a leader goes on if no follower would do
better. It must never append, count or elect by itself. Only the replica uses it.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from smq.raft_state.commands import ElectLeader
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset
from smq.raft_state.replies import Reply
from smq.raft_state.state import PartitionState
from smq.replication.api import Acks, ProduceRequest
from smq.replication.host import Host
from smq.replication.log.partition_log import PartitionLog
from smq.replication.partition.admission import JUDGED_BY_THE_LOG, NotYetKnown, PreparedBatch, SendOrder
from smq.replication.partition.streams import FollowerStream
from smq.replication.storage.hang import HangGuard

LAG_BYTES_MAX: Final = 4 << 20  # it begins only to a follower this close, to keep the pause short
PAUSE_MS_MAX: Final = 1_000  # after a longer one, batches are accepted again
PARKED_MAX: Final = 1_000  # batches; further ones are refused with a retry hint
PARKED_BYTES_MAX: Final = 8 << 20
RETRY_MS: Final = 50


def handed_over() -> SmqError:
    return SmqError(
        ErrorCode.LEADER_UNAVAILABLE, "leadership is being handed over", ErrorDetails(retry_after_ms=RETRY_MS)
    )


class Leading(Protocol):
    """What a handover sees of its replica."""

    part: PartitionState
    log: PartitionLog
    leading: Epoch | None

    @property
    def durable_verified_end(self) -> Offset: ...

    def known_commit_point(self) -> Offset: ...

    def stream_to(self, peer: NodeId) -> FollowerStream | None: ...

    def transfer(self, target: NodeId) -> bool: ...

    def resign(self) -> None: ...

    def produce(self, request: ProduceRequest, prepared: PreparedBatch) -> None: ...

    def not_leader(self) -> SmqError: ...


@dataclass(frozen=True, slots=True)
class _Parked:
    request: ProduceRequest
    prepared: PreparedBatch


class HandOver:
    def __init__(self, host: Host, replica: Leading, send_order: SendOrder) -> None:
        self._host = host
        self._send_order = send_order
        self._replica = replica
        self._target: NodeId | None = None  # this node itself in a renewal
        self._attempt = 0  # timers and answers of former ones count for nothing
        self._is_proposed = False
        self._parked: deque[_Parked] = deque()
        self._parked_bytes = 0

    @property
    def is_under_way(self) -> bool:
        return self._target is not None

    def begin(self, target: NodeId) -> bool:
        """False if this node does not lead, is already handing over, or the target is not known to be close."""
        replica = self._replica
        stream = replica.stream_to(target)
        if replica.leading is None or self._target is not None or stream is None or stream.acked_end is None:
            return False
        if stream.acked_end < replica.log.appended_end and not stream.lags_at_most(LAG_BYTES_MAX):
            return False
        self._aim_at(target)
        return True

    def renew(self) -> None:
        """Has this node itself elected for the next epoch: a follower takes no more part in this one."""
        if self._replica.leading is not None and not self._is_proposed and self._target != self._host.node_id:
            self._aim_at(self._host.node_id)

    def _aim_at(self, target: NodeId) -> None:
        self._target = target
        self._attempt += 1
        self._is_proposed = False
        at_ns = self._host.clock.monotonic_ns() + PAUSE_MS_MAX * 1_000_000
        self._host.deadlines.add(at_ns, partial(self._on_pause_over, self._attempt))
        self.drive()

    def drive(self) -> None:
        """Proposes the target once it has the whole log."""
        replica, target = self._replica, self._target
        if target is None or self._is_proposed or replica.leading is None:
            return
        end, incarnation = self._log_of(target)
        if incarnation is None or end != replica.log.appended_end:
            return
        self._is_proposed = True
        command = ElectLeader(
            partition=replica.part.pid,
            expected_epoch=replica.leading,
            candidate=target,
            incarnation=incarnation,
            end=end,
            by_leader=True,
        )
        self._host.propose(command, PAUSE_MS_MAX, partial(self._on_result, self._attempt))

    def _log_of(self, target: NodeId) -> tuple[Offset | None, Incarnation | None]:
        if target == self._host.node_id:
            return self._replica.durable_verified_end, self._host.incarnation
        stream = self._replica.stream_to(target)
        return (stream.acked_end, stream.incarnation) if stream is not None else (None, None)

    def _on_result(self, attempt: int, result: Reply | SmqError) -> None:
        if attempt != self._attempt or not isinstance(result, SmqError):
            return
        if self._target == self._host.node_id:
            self._replica.resign()  # the controller elects, perhaps this node
        else:
            self._aim_at(self._host.node_id)

    def _on_pause_over(self, attempt: int) -> None:
        """The target did not get everything in time. In a renewal, this node's own disk did not."""
        if attempt != self._attempt or self._target is None or self._is_proposed:
            return
        if self._target != self._host.node_id:
            self._resume()
        else:
            self._replica.resign()

    def _resume(self) -> None:
        """Nothing was proposed. Parked batches are taken first, in order, before any new one. What would be refused for
        what this node does not know is to be sent again: only after a barrier is it certain, and the next try waits for
        one."""
        self._target = None
        for parked in self._drain_parked():
            try:
                self._replica.produce(parked.request, parked.prepared)
            except SmqError as e:
                is_certain = e.code not in JUDGED_BY_THE_LOG and not isinstance(e, NotYetKnown)
                self._refuse(parked, e if is_certain else handed_over())

    def park(self, request: ProduceRequest, prepared: PreparedBatch) -> bool:
        """Keeps a producer waiting. False if the bounds are reached."""
        size = len(prepared.data)
        if len(self._parked) >= PARKED_MAX or self._parked_bytes + size > PARKED_BYTES_MAX:
            return False
        self._parked.append(_Parked(request, prepared))
        self._parked_bytes += size
        return True

    def end(self, error: Callable[[], SmqError] | None = None) -> None:
        """This process no longer leads. No parked batch has been appended."""
        self._target = None
        self._attempt += 1
        self._is_proposed = False
        for parked in self._drain_parked():
            self._refuse(parked, (error or self._replica.not_leader)())

    def _drain_parked(self) -> list[_Parked]:
        parked = list(self._parked)
        self._parked.clear()
        self._parked_bytes = 0
        return parked

    def _refuse(self, parked: _Parked, error: SmqError) -> None:
        request = parked.request
        if request.acks is not Acks.NONE:
            self._send_order.expect(self._replica.part.pid, parked.prepared.data)
        self._host.measures.produced.add(1, error.code.name)
        self._host.deliver(lambda: request.done(error))


def step_aside(
    replica: Leading, streams: Collection[FollowerStream], *, is_full: bool, hang: HangGuard, is_refusing: bool
) -> None:
    """`is_full` and `hang` are of this node's own disk. `is_refusing`: too much waits for it to take batches of this
    partition, and another replica is on a node that could lead. To be called periodically while the replica leads."""
    reported = [(s.acked_end, s) for s in streams if s.acked_end is not None]
    if any(s.is_unreadable for s in streams) and any(end >= replica.known_commit_point() for end, _ in reported):
        replica.resign()  # a follower needs bytes that are damaged here: one that has them should lead
    if replica.leading is not None and is_full:
        any(replica.transfer(s.peer) for _, s in reported if not s.is_full)  # to the first that is close enough
    if replica.leading is not None and hang.hangs:
        _leave_hung_disk(replica, reported, hang, is_refusing=is_refusing)


def _leave_hung_disk(
    replica: Leading, reported: list[tuple[Offset, FollowerStream]], hang: HangGuard, *, is_refusing: bool
) -> None:
    """A follower that stored more than this disk did is the proof that its own disk writes. A handover loses no record;
    if none succeeds in time, the controller elects one of the followers that reach the high water mark. If batches of
    other partitions fill the room, no follower can store more than this disk did: then another node's word that its
    disk writes is enough, and the controller elects."""
    ahead = [(end, s) for end, s in reported if end > replica.durable_verified_end]
    ahead.sort(key=lambda follower: follower[0], reverse=True)
    if hang.hangs_on and (is_refusing or any(end >= replica.known_commit_point() for end, _ in ahead)):
        replica.resign()
    else:
        any(replica.transfer(s.peer) for _, s in ahead if not s.is_full)
