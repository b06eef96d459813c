"""What a node does for its own disk: repair what the scrubber finds, watch the free space, notice that it hangs.

Owns the scrubber of one node, the repair of each row that it finds damaged, the checks of the disk's space and of its
writing, and their status and warnings. It must hold no rule: those are in `partition.repair`, `partition.intake`,
`scrub` and `storage.hang`. Only the node imports it, and drives it by its ticks and heartbeats.
"""

from collections.abc import Callable

import structlog

from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.api import StorageStatus
from smq.replication.host import Host
from smq.replication.log.stored_batch import BatchDamaged, StoredValue
from smq.replication.maintenance.scrub import Damage, Scrubber
from smq.replication.partition.intake import SpaceGuard
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import DataDamaged, Table
from smq.replication.storage.hang import HangGuard

_log = structlog.get_logger("smq.storage")


class DiskMaintenance:
    def __init__(self, host: Host, replicas: Replicas, space: SpaceGuard, hang: HangGuard) -> None:
        self._host = host
        self._replicas = replicas
        self._space = space
        self._hang = hang
        self.scrubber = Scrubber(
            host.clock,
            host.disk,
            host.config.scrub_period_s,
            repair=self._repair,
            verify_batch_at=self._verify_batch_at,
        )

    def on_tick(self, now_ns: int) -> None:
        was_hung = self._hang.hangs
        self._hang.observe(now_ns)
        if self._hang.hangs != was_hung:
            log = _log.error if self._hang.hangs else _log.info
            log("the disk hangs" if self._hang.hangs else "the disk writes again", node=self._host.node_id)

    def on_beat(self) -> None:
        self._check_space()
        self.scrubber.on_beat()

    # ---------------------------------------------------------------------------------------- for the scrubber
    def _repair(self, table: Table, damage: Damage) -> None:
        if isinstance(damage, BatchDamaged):
            self._repair_batch(damage)
        elif table in (Table.CHECKPOINTS, Table.TIMES):
            self._repair_row_of_log(table, damage)
        else:
            _log.warning("damage found", node=self._host.node_id, what=f"{table.value}, {damage.hex()}: rewritten")
            self._host.engine.rewrite_row(table, damage)

    def _repair_batch(self, damage: BatchDamaged) -> None:
        """A batch or an index row. One of a partition that this node does not hold is ignored."""
        replica = self._replicas.get(damage.pid)
        if replica is not None and (damage.row is not None or replica.log.holds(damage.offset)):
            self._replicas.repair(damage, lambda _is_repaired: None)

    def _verify_batch_at(self, pid: PartitionId, offset: Offset, done: Callable[[bool], None]) -> bool:
        replica = self._replicas.get(pid)
        if replica is None or not replica.log.holds(offset):
            return True  # deleted meanwhile

        def on_read(found: list[StoredValue] | DataDamaged | None) -> None:
            if isinstance(found, BatchDamaged):
                self._repair_batch(found)
            done(isinstance(found, BatchDamaged))

        return replica.log.read_later(offset, Offset(offset + 1), 1, on_read) is not None

    def _repair_row_of_log(self, table: Table, key: bytes) -> None:
        log = self._replicas.log(PartitionId(key[:PARTITION_ID_BYTES]))
        if log is None:
            return
        is_checkpoint = table is Table.CHECKPOINTS
        what = "a checkpoint" if is_checkpoint else "the row of an aborted transaction"
        _log.warning("damage found", node=self._host.node_id, what=f"{what} of {log!r}: rewritten")
        if is_checkpoint:
            log.rewrite_checkpoint(key)
        else:
            log.rewrite_aborted(key)

    # ---------------------------------------------------------------------------------------- space
    def _check_space(self) -> None:
        was_full = self._space.is_full
        self._space.refresh()
        if self._space.is_full != was_full:
            log = _log.error if self._space.is_full else _log.info
            what = "disk full: no records are appended" if self._space.is_full else "the disk has space again"
            found = self._space.space
            log(what, node=self._host.node_id, free=found.free_bytes, reusable=found.reusable_bytes)

    # ---------------------------------------------------------------------------------------- reporting
    def status(self) -> StorageStatus:
        counts, progress, space = self._replicas.repairs.counts, self.scrubber.progress, self._space.space
        return StorageStatus(
            free_bytes=space.free_bytes,
            total_bytes=space.total_bytes,
            reusable_bytes=space.reusable_bytes,
            is_full=self._space.is_full,
            is_hung=self._hang.hangs,
            damage_found=counts.found,
            damage_repaired=counts.repaired,
            damage_unrepaired=counts.failed,
            scrub_found=progress.found,
            scrub_bytes=progress.read_bytes,
            scrub_passes=progress.passes,
            scrub_ended_ms=progress.ended_ms,
        )

    def warnings(self) -> list[str]:
        """For an operator to act on."""
        found = [self._space.refusal(self._host.node_id).message] if self._space.is_full else []
        if self._hang.hangs:
            found.append(
                f"the disk of node {self._host.node_id} has written nothing for {self._hang.waited_ns // 10**9} s: "
                "look at the machine's log for errors of the disk; if it stays so, stop the node and replace the disk"
            )
        counts = self._replicas.repairs.counts
        if counts.found:
            found.append(
                f"{counts.found} damaged batches found since its start, {counts.repaired} repaired: if it happens "
                "again, replace the disk"
            )
        return found
