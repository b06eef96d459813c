"""Where a leader's commit point goes: to Raft, whose high water mark follows it, and to the followers.

A majority moves the commit point (`Replica._recount`, rule 8). Owns what is proposed for it, the HWM advance of rule 9,
which apply judges (`raft_state`); the message to followers where no append carries the point (rule 24); and the steps
before a log start that lies beyond the mark (rule 14). Each function looks at the replica as it is at the moment, and
returns nothing if there is nothing to say any more. `replicas` uses it, at its own pace.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from smq.raft_state.commands import AdvanceLogStart, Command, HwmAdvance
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.raft_state.replies import HwmsAdvanced, Reply
from smq.replication.api import DoneFn, PartitionEnd
from smq.replication.commands.coalescing import Coalescer
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.net.links import Links
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel, Clock


def _led_epoch(replica: Replica) -> Epoch | None:
    """The epoch that this process leads, if it is still current."""
    return replica.leading if replica.leading == replica.part.epoch else None


def hwm_advances(replica: Replica) -> list[HwmAdvance]:
    """Rule 9."""
    epoch, part = _led_epoch(replica), replica.part
    if epoch is None:
        return []
    hwm = replica.known_commit_point()
    if hwm == part.hwm:
        return []
    log = replica.log
    return [HwmAdvance(partition=replica.pid, epoch=epoch, hwm=hwm, next_offset=log.appended_end, ts_ns=log.last_ts_ns)]


def propose_advances(host: Host, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
    """Counts what apply has made of each item: one of an epoch that is over changes nothing."""

    def counted(reply: Reply | SmqError) -> None:
        if isinstance(reply, HwmsAdvanced):
            accepted = sum(reply.accepted)
            host.measures.advances.add(accepted, "accepted")
            host.measures.advances.add(len(reply.accepted) - accepted, "rejected")
        done(reply)

    host.propose(command, timeout_ms, counted)


def untold_commits(replica: Replica) -> list[tuple[NodeId, Epoch, Offset]]:
    """Rule 24: the followers that do not know the commit point, and the point."""
    epoch = _led_epoch(replica)
    if epoch is None:
        return []
    told = [(stream.peer, stream.take_commit()) for stream in replica.streams.values()]
    return [(peer, epoch, commit) for peer, commit in told if commit is not None]


PACE_MS: Final = 5  # a message costs more than the append that it follows; under load the next append comes sooner
POINTS_MAX: Final = 5_000  # per message: 160 KB, a millisecond at either end


class Commits:
    """Sends followers the commit points that have moved: the first immediately, the further ones at a pace."""

    def __init__(self, links: Links, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._rounds = Coalescer[Replica](clock, self._tell)  # bounded by the node's partitions
        self.mark = self._rounds.add  # the commit point of a led partition has moved, or a follower may not know it

    def _tell(self, moved: dict[Replica, None]) -> None:
        self._clock.call_later(PACE_MS, self._rounds.end)
        by_peer: dict[NodeId, list[tuple[PartitionId, Epoch, Offset]]] = {}
        for replica in moved:
            for peer, epoch, commit in untold_commits(replica):
                by_peer.setdefault(peer, []).append((replica.pid, epoch, commit))
        moved.clear()
        for peer, points in by_peer.items():
            for start in range(0, len(points), POINTS_MAX):
                self._links.send(peer, Channel.DATA, wire.Commits(tuple(points[start : start + POINTS_MAX])))


STEP_MS: Final = 5  # between two looks at the mark


class LogStarts:
    def __init__(
        self,
        host: Host,
        ends: ExactEnds,
        replica: Callable[[PartitionId], Replica | None],
        mark_due: Callable[[Replica], None],
    ) -> None:
        """`mark_due` has the mark of a replica that leads proposed without a pace."""
        self._host = host
        self._ends = ends
        self._replica = replica
        self._mark_due = mark_due

    def propose(self, command: AdvanceLogStart, timeout_ms: int, done: DoneFn[Reply]) -> None:
        """`timeout_ms` is the caller's."""
        part = self._host.state.partition(command.partition)
        if part is None or command.offset <= part.hwm:
            self._host.propose(command, timeout_ms, done)
            return
        until_ms = self._now_ms() + timeout_ms
        self._ends.ask_one(command.partition, timeout_ms // 2, partial(self._on_end, command, until_ms, done))

    def _now_ms(self) -> int:
        return self._host.clock.monotonic_ns() // 1_000_000

    def _on_end(
        self, command: AdvanceLogStart, until_ms: int, done: DoneFn[Reply], end: PartitionEnd | SmqError
    ) -> None:
        if isinstance(end, SmqError) and end.code is not ErrorCode.UNKNOWN_TOPIC:
            done(end)  # refused by a mark that is behind, a client would take the offset for one that does not exist
        else:
            goal = command.offset if isinstance(end, SmqError) else min(command.offset, end.hwm)
            self._propose_above(goal, command, until_ms, done)

    def _propose_above(self, goal: Offset, command: AdvanceLogStart, until_ms: int, done: DoneFn[Reply]) -> None:
        """Once the mark that is applied here has reached the goal. It gets there: what is committed stays committed."""
        part, left_ms = self._host.state.partition(command.partition), until_ms - self._now_ms()
        if part is None or part.hwm >= goal or left_ms <= STEP_MS:
            self._host.propose(command, max(1, left_ms), done)
            return
        replica = self._replica(command.partition)
        if replica is not None and replica.leading is not None:
            self._mark_due(replica)
        self._host.clock.call_later(STEP_MS, partial(self._propose_above, goal, command, until_ms, done))
