"""Deletes what the topics do not retain: by age, bytes and records, for the partitions that this node leads.

Owns which led partition is examined when, one after the other. The log says what may go. Log starts that are found
while a command is in flight share the next, every replica applies it, and deletes in slices. It must never delete
anything itself, and never at or above the high water mark or the last stable offset. Age is judged by the replicated
clock: no node's own clock deletes a record.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from smq.raft_state.commands import ApplyRetention, RetainedStart
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, PartitionId
from smq.raft_state.topic_config import Retention, retention
from smq.replication.host import Host
from smq.replication.log.reader import Retained
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.proposals import Proposals
from smq.replication.partition.replica import Replica

_log = structlog.get_logger("smq.retention")

AGE_STEPS: Final = 100  # a record is deleted by a hundredth of its age too late, at most
PAUSE_MS_MAX: Final = 300_000
ITEMS_MAX: Final = 100  # per command: each deletes on every node, and what is committed next waits for that


@dataclass(slots=True)
class _Watch:
    """What is known of one partition."""

    due_ns: int = 0  # the next look at its topic's limits
    paused_ns: int = 0  # the next examination by the same limits
    examined: Retention | None = None  # the limits of the last one
    found: RetainedStart | None = None  # by it
    uncounted: tuple[int, int] | None = None  # offsets and bytes before that, until they have gone


class Retainer:
    def __init__(self, host: Host, look_ups: LookUps) -> None:
        self._host = host
        self._look_ups = look_ups
        self._due: dict[Replica, None] = {}  # bounded by the node's partitions
        self._is_examining = False
        self._watches: dict[PartitionId, _Watch] = {}  # of those that this node has led
        self._mark_found = Proposals(
            host.clock,
            host.propose,
            self._still_due,
            lambda items: ApplyRetention(items=items),
            items_max=ITEMS_MAX,
        ).mark_due

    def visit(self, replica: Replica, now_ns: int) -> None:
        """To be called often for every led partition."""
        watch = self._watches.get(replica.pid)
        if watch is None:
            watch = self._watches[replica.pid] = _Watch()
        self._count(replica, watch)
        if now_ns < watch.due_ns:
            return
        check_ms, limits = self._host.config.retention_check_ms, self._limits(replica)
        watch.due_ns = now_ns + check_ms * 1_000_000
        if limits is None or (limits == watch.examined and now_ns < watch.paused_ns):
            return
        watch.examined = limits
        watch.paused_ns = now_ns + _pause_ms(limits, check_ms) * 1_000_000
        if _may_be_exceeded(replica, limits):
            self._due[replica] = None
            self._examine_next()

    def _count(self, replica: Replica, watch: _Watch) -> None:
        """Once the log start has moved to where it was found to be due."""
        if watch.uncounted is not None and watch.found is not None and replica.part.log_start >= watch.found.offset:
            offsets, size = watch.uncounted
            self._host.measures.retained_offsets.amount += offsets
            self._host.measures.retained_bytes.amount += size
            watch.uncounted = None

    def forget(self, pid: PartitionId) -> None:
        """The partition is gone."""
        self._watches.pop(pid, None)

    def _limits(self, replica: Replica) -> Retention | None:
        name = self._host.state.topic_names.get(replica.part.topic_id)
        return retention(self._host.state.topics[name].config) if name is not None else None

    def _examine_next(self) -> None:
        while self._due and not self._is_examining:
            replica = next(iter(self._due))
            del self._due[replica]
            limits, epoch, now_ms = self._limits(replica), replica.leading, self._host.state.expiry_clock_ms
            if limits is None or epoch is None:
                continue
            look_up = limits if now_ms else limits._replace(ms=None)  # a new cluster has no time yet
            self._is_examining = True
            self._look_ups.retained_start(replica, look_up, now_ms, partial(self._on_found, replica, epoch, limits))

    def _on_found(self, replica: Replica, epoch: Epoch, limits: Retention, found: Retained | SmqError) -> None:
        self._is_examining = False
        watch = self._watches.get(replica.pid)
        if isinstance(found, SmqError):
            _log.info("retention is tried again later", node=self._host.node_id, why=str(found))
        elif watch is not None:
            self._count(replica, watch)
            watch.found = RetainedStart(partition=replica.pid, epoch=epoch, offset=found.start, limits=limits.numbers)
            if self._still_due(replica):
                watch.uncounted = found.start - replica.part.log_start, found.size
                self._mark_found(replica)
                if found.is_more:
                    watch.due_ns, watch.examined = 0, None  # no pause before the next visit
        self._examine_next()

    def _still_due(self, replica: Replica) -> list[RetainedStart]:
        """Its log start has not been moved there, and no other leader or operator has changed what counts."""
        watch, limits = self._watches.get(replica.pid), self._limits(replica)
        found = watch.found if watch is not None else None
        if found is None or limits is None or found.offset <= replica.part.log_start:
            return []
        is_current = replica.leading == replica.part.epoch == found.epoch and found.limits == limits.numbers
        return [found] if is_current else []


def _may_be_exceeded(replica: Replica, limits: Retention) -> bool:
    """Seen without a read."""
    part = replica.part
    return part.hwm > part.log_start and (
        limits.ms is not None
        or (limits.bytes is not None and replica.log.size_bytes > limits.bytes)
        or (limits.records is not None and part.hwm - part.log_start > limits.records)
    )


def _pause_ms(limits: Retention, check_ms: int) -> int:
    """Until the partition is examined again, unless its limits change."""
    if limits.bytes is not None or limits.records is not None or limits.ms is None:
        return check_ms
    return max(check_ms, min(PAUSE_MS_MAX, limits.ms // AGE_STEPS))
