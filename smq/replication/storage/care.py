"""What a node does for its own disk: rotten batches fetched again, everything read once in a while, room watched.

Owns repairs, scrubber and reserve of one node, and what status and metrics tell of them. It holds no rule: those are in
`repair`, `scrub` and `space`. The node's core drives it by its beats and hands it the messages of repairs.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.replication.api import StorageStatus
from smq.replication.host import ReplicaHost
from smq.replication.log.store import BatchDamaged, PartitionLog
from smq.replication.net import wire
from smq.replication.partition.repair import Outcome, Repairs
from smq.replication.partition.replica import Replica
from smq.replication.ports import Clock, Disk, Engine, Table
from smq.replication.storage.scrub import Scrubber
from smq.replication.storage.space import SpaceGuard

_log = structlog.get_logger("smq.storage")


class CareHost(ReplicaHost, Protocol):
    @property
    def engine(self) -> Engine: ...


class StorageCare:
    """`replicas` and `logs` are the node's own tables, read here only."""

    def __init__(
        self,
        host: CareHost,
        disk: Disk,
        replicas: Mapping[PartitionId, Replica],
        logs: Callable[[], Mapping[PartitionId, PartitionLog]],
    ) -> None:
        self._host = host
        self._replicas = replicas
        self._logs = logs
        self.repairs = Repairs(host)
        self.space = SpaceGuard(disk, host.config.disk_reserve_bytes)
        self.scrubber = Scrubber(self, disk, host.config.scrub_period_s)

    @property
    def clock(self) -> Clock:
        return self._host.clock

    def on_beat(self) -> None:
        self._look_at_space()
        self.scrubber.on_beat()

    # ---------------------------------------------------------------------------------------- repairs
    def on_message(self, peer: NodeId, message: wire.FetchBatch | wire.FoundBatch) -> None:
        if isinstance(message, wire.FetchBatch):
            self.repairs.on_fetch(peer, self._replicas.get(message.partition), message)
        else:
            self.repairs.on_found(peer, message)

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        replica = self._replicas.get(damage.pid)
        if replica is None:
            self._host.deliver(lambda: done(False))
        else:
            self.repairs.want(replica, damage, lambda outcome: done(outcome is Outcome.REPAIRED))

    def mend_rotten(self, replica: Replica) -> None:
        """What recovery has found: one at a time and partition, and again with the next beat."""
        damage = BatchDamaged(replica.pid, min(replica.log.rotten), "its bytes do not match its CRC-32C")
        self.repair(damage, lambda _is_whole: None)

    def mend_batch(self, damage: BatchDamaged) -> None:
        replica = self._replicas.get(damage.pid)
        if replica is not None and (damage.row is not None or replica.log.holds(damage.offset)):
            self.repair(damage, lambda _is_whole: None)

    def look_at(self, pid: PartitionId, offset: Offset) -> bool:
        replica = self._replicas.get(pid)
        try:
            if replica is not None and replica.log.holds(offset):
                replica.log.read(offset, Offset(offset + 1), 1)
        except BatchDamaged as damage:
            self.mend_batch(damage)
            return True
        return False

    def mend_checkpoint(self, pid: PartitionId, key: bytes) -> None:
        log = self._logs().get(pid)
        if log is not None:
            _log.warning("damage found", node=self._host.node_id, what=f"a checkpoint of {log!r}: written anew")
            log.mend_checkpoint(key)

    def mend_raft(self, table: Table, key: bytes) -> None:
        _log.warning("damage found", node=self._host.node_id, what=f"{table.value}, {key.hex()}: written anew")
        self._host.engine.mend(table, key)

    # ---------------------------------------------------------------------------------------- room
    def _look_at_space(self) -> None:
        was_full = self.space.is_full
        self.space.look()
        if self.space.is_full != was_full:
            tell = _log.error if self.space.is_full else _log.info
            what = "disk full: no records are appended" if self.space.is_full else "the disk has room again"
            found = self.space.space
            tell(what, node=self._host.node_id, free=found.free_bytes, reusable=found.reusable_bytes)

    def full_error(self, node: NodeId) -> SmqError:
        """Of this node, or of another that has said so."""
        if node == self._host.node_id:
            return self.space.refusal(node)
        message = f"node {node} has no room for records, and too few replicas are left for a majority: free its disk"
        return SmqError(ErrorCode.STORAGE_FULL, message)

    # ---------------------------------------------------------------------------------------- telling
    def status(self) -> StorageStatus:
        counts, progress, space = self.repairs.counts, self.scrubber.progress, self.space.space
        return StorageStatus(
            free_bytes=space.free_bytes,
            reusable_bytes=space.reusable_bytes,
            is_full=self.space.is_full,
            damage_found=counts.found,
            damage_repaired=counts.repaired,
            damage_unrepaired=counts.refused,
            scrub_found=progress.found,
            scrub_bytes=progress.read_bytes,
            scrub_passes=progress.passes,
            scrub_ended_ms=progress.ended_ms,
        )

    def warnings(self) -> list[str]:
        """What an operator should do something about."""
        told = [self.space.refusal(self._host.node_id).message] if self.space.is_full else []
        counts = self.repairs.counts
        if counts.found:
            told.append(
                f"{counts.found} damaged batches found since its start, {counts.repaired} repaired: where it happens "
                "again and again, replace the disk"
            )
        return told
