"""Moving the log start of a partition whose mark follows its commit point (rule 14).

A log start may reach the commit point, which clients know, and Raft's high water mark is a little behind it. Owns the
steps before the command: the leader says where the partition ends, and the mark moves there or to the requested offset.
If this node leads, it moves the mark immediately; another leader does so at its own pace. It must never judge: apply
decides. `replicas` makes it, and the node's requests use it.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn, PartitionEnd
from smq.replication.host import Host
from smq.replication.partition.ends import ExactEnds
from smq.replication.partition.replica import Replica

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
