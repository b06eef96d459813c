"""What happens to the disks of a group: one is replaced, loses rows, or holds bytes that changed.

Owns these faults, and how many replicas may have lost something at a time: no more than elections can do without. It
must never judge: `truth` does. Each is a step of a schedule.
"""

from abc import ABC, abstractmethod
from typing import Final

from chaos_tests.sim.partition.member import Member
from chaos_tests.sim.partition.truth import Truth
from smq.raft_state.ids import NodeId, PartitionId
from smq.raft_state.machine import Machine
from smq.raft_state.seals import seals_needed
from smq.raft_state.state import PartitionState
from smq.replication.log.codec import BatchDamaged, base_of_key
from smq.replication.ports import Table
from smq.testing.virtual.disk import DiskImage

DAMAGED: Final = b"damaged"  # in place of a row


class DiskFaults(ABC):
    """Of a group that has these members, and knows the state of Raft."""

    pid: PartitionId
    members: dict[NodeId, Member]
    truth: Truth
    head: Machine

    @property
    @abstractmethod
    def part(self) -> PartitionState: ...

    @abstractmethod
    def member(self, node: int) -> Member: ...

    @abstractmethod
    def crash(self, node: int) -> None: ...

    def wipe(self, node: int) -> bool:
        """Another disk takes the place of its own, without anything on it. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        self.truth.disk_goes(member)
        member.image = type(member.image)()
        member.disk_number += 100
        member.applied = 0
        member.has_lost_log = False
        member.has_lost = True
        return True

    def damage_tail(self, node: int, batches: int = 1) -> bool:
        """Its last batches cannot be read, nor the rows that describe them. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)[-batches:]
        if not keys:
            return False
        self.truth.disk_goes(member)
        for key in keys:
            member.image.tables[Table.BATCHES][key] = DAMAGED
        for key in list(member.image.tables[Table.TIMES]):
            member.image.tables[Table.TIMES][key] = DAMAGED
        member.image.is_damaged = member.has_lost = True
        return True

    def damage_running(self, node: int, number: int) -> bool:
        """Of its batches, this one and its index row cannot be read any more. The process goes on."""
        member = self.member(node)
        bases = [base_of_key(key) for key in self._keys(member.disk.image)] if member.is_up else []
        if not bases or not self.may_lose(node):
            return False
        base = bases[number % len(bases)]
        self.truth.disk_goes(member)
        member.disk.image.is_damaged = member.has_lost = True
        for table in (Table.BATCHES, Table.TIMES):
            rows = member.disk.image.tables[table]
            for key in [k for k in rows if k.startswith(self.pid) and base_of_key(k) == base]:
                rows[key] = DAMAGED
        if member.replica is not None:
            member.replica.log.release_tail()
        return True

    def scrub(self, node: int) -> None:
        """The node's scrubber finds what no reader has met."""
        member = self.member(node)
        rows = member.disk.image.tables[Table.BATCHES] if member.is_up else {}
        for key in [key for key, value in rows.items() if value == DAMAGED]:
            member.replicas.repair(BatchDamaged(self.pid, base_of_key(key), "the scrubber found it"), lambda _: None)

    def _keys(self, image: DiskImage) -> list[bytes]:
        """Of its batches."""
        return [key for key in image.tables[Table.BATCHES] if key.startswith(self.pid)]

    def lose_last_batch(self, node: int) -> bool:
        """Its last batch is gone, as if a page had lost a row. The index row is still there, or nothing happens. The
        node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)
        if not keys or not self._is_indexed(member.image, keys[-1]):
            return False
        self.truth.disk_goes(member)
        del member.image.tables[Table.BATCHES][keys[-1]]
        member.image.is_damaged = member.has_lost = True
        return True

    def _is_indexed(self, image: DiskImage, batch: bytes) -> bool:
        """Whether an index row says that there is this batch."""
        rows, base = image.tables[Table.TIMES], base_of_key(batch)
        return any(k.startswith(self.pid) and base_of_key(k) == base and row != DAMAGED for k, row in rows.items())

    def lose_log(self, node: int) -> bool:
        """Its log is gone without a trace, and its Raft is not: it keeps the partition. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        self.truth.disk_goes(member)
        for table in (Table.BATCHES, Table.TIMES, Table.CHECKPOINTS):
            for key in [k for k in member.image.tables[table] if k.startswith(self.pid)]:
                del member.image.tables[table][key]
        member.image.is_damaged = member.has_lost = member.has_lost_log = True
        return True

    def may_lose(self, node: int) -> bool:
        """As long as no more replicas have lost something than elections can do without."""
        lossy = {int(m.node) for m in self.members.values() if self._is_lossy(m)}
        return len(lossy | {node}) <= len(self.members) - seals_needed(len(self.members))

    def _is_lossy(self, member: Member) -> bool:
        """Its disk may hold less than it has acknowledged, or damage not yet repaired, or its log lacks producers."""
        replica = member.replica
        if member.has_lost and replica is not None:
            known = self.head.state.nodes[member.node].incarnation == member.processes
            member.has_lost = not known or replica.is_end_hidden or bool(replica.log.damaged_batches)
        lacks_producers = replica is not None and not replica.log.has_producers
        is_incomplete = member.node in self.part.incomplete
        return member.has_lost or is_incomplete or lacks_producers or self.truth.is_rotten(member)

    def rot(self, node: int) -> bool:
        """Its last batch fails its CRC, and its index row says what it was. The node is down afterwards."""
        member = self.member(node)
        if not self.may_lose(node):
            return False
        self.crash(node)
        keys = self._keys(member.image)
        if not keys:
            return False
        self.truth.disk_goes(member)
        value = bytearray(member.image.tables[Table.BATCHES][keys[-1]])
        value[-1] ^= 1
        member.image.tables[Table.BATCHES][keys[-1]] = bytes(value)
        member.image.is_damaged = True
        return True
