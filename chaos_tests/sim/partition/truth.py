"""What is committed, for ever: the judge of a group.

Owns the committed batches and the demands on them. A batch is committed once any process takes it for that, and from
then on it is where it is: on the disks of a majority at that moment, the same for every reader, in every later history
of epochs, and in no contradiction to the answers of producers. It must never look at what a schedule does, only at what
the nodes say.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from chaos_tests.sim.partition.member import Member
from chaos_tests.sim.partition.producer_truth import ProducerTruth, Transaction, Violation
from smq.raft_state.ids import Epoch, Offset, PartitionId
from smq.raft_state.state import PartitionState
from smq.records import NewRecord
from smq.replication.log.stored_batch import BatchDamaged, StoredValue, base_of_key, batch_key, parse_value
from smq.replication.partition.replica import Replica
from smq.replication.ports import DataDamaged, Table
from smq.testing.virtual.disk import DiskImage

READ_BYTES: Final = 1 << 20
CREATED_MS: Final = 1_000


@dataclass(eq=False, slots=True)
class Record:
    """One batch that a producer has sent. `base` and `epoch` are those that its leader gave it."""

    number: int
    epoch: Epoch
    base: Offset
    end: Offset
    key: bytes | None = None
    is_acked: bool = False
    is_lost: bool = False  # by the answer to its producer
    transaction: Transaction | None = None
    is_tombstone: bool = False

    @property
    def text(self) -> bytes:
        return b"<%06d>" % self.number

    @property
    def content(self) -> NewRecord:
        """Its text is the value, or a header of a tombstone."""
        if self.is_tombstone:
            return NewRecord(self.key, None, CREATED_MS, [("text", self.text)])
        return NewRecord(self.key, self.text, CREATED_MS)


class Truth:
    def __init__(self, pid: PartitionId, members: Sequence[Member]) -> None:
        self._pid = pid
        self._members = members
        self._batches: dict[Offset, StoredValue] = {}
        self._lost: dict[tuple[Epoch, Offset], Record] = {}
        self._checked: dict[tuple[Member, int, int], Offset] = {}  # per process and generation of its log
        self._known: dict[tuple[Member, int], Offset] = {}
        self._gone: dict[Member, set[bytes]] = {member: set() for member in members}  # what its lost disks held
        self.producers = ProducerTruth()
        self._in_transactions: dict[bytes, Transaction] = {}  # by the text of a record
        self.end = Offset(0)
        self._compacted_end = Offset(0)

    # ------------------------------------------------------------------------------------------ what nodes say
    def look(self) -> None:
        """At what every process takes for committed now. The process that has most of it has counted it."""
        live = [(m, m.replica) for m in self._members if m.replica is not None]
        for member, replica in sorted(live, key=lambda pair: -pair[1].readable_end if pair[1] else 0):
            if replica is not None and replica.has_followed:
                self._read(member, replica)
        for member, replica in live:
            assert replica is not None
            known, key = replica.known_commit_point(), (member, member.processes)
            while known > self.end:
                self._fix(self._next_of(replica.part, known))  # its own copy is damaged
            if known < self._known.get(key, 0):
                raise Violation(f"node {member.node}: the commit point went back from {self._known[key]} to {known}")
            self._known[key] = known
            # A process may begin with a state that is older than its log's start, below which everything is stable.
            log_start = max(replica.part.log_start, replica.log.log_start)
            stable_end = self.producers.stable_end(known, replica.log.appended_end)
            if replica.has_followed and replica.stable_end > max(stable_end, log_start):
                raise Violation(f"node {member.node}: {replica.stable_end} is not stable, with {known} known")
            if member.replicas.repairs.counts.found and not member.disk.image.is_damaged:
                raise Violation(f"node {member.node} takes batches of a sound disk for damaged")

    def _read(self, member: Member, replica: Replica) -> None:
        """What it serves, as far as that is new."""
        log, end = replica.log, replica.readable_end
        key = (member, member.processes, log.generation)
        at = max(self._checked.get(key, Offset(0)), log.log_start)
        while at < end:
            try:
                found = log.read(at, end, READ_BYTES)
            except BatchDamaged:
                return  # it is not served, and looked at again once it is repaired
            if not found:
                raise Violation(f"node {member.node} serves nothing at {at}, below its end {end}")
            for stored in found:
                if stored.end > end:
                    raise Violation(f"node {member.node}: the commit point {end} is inside the batch at {stored.base}")
                self._see(stored)
                at = stored.end
        self._checked[key] = at

    def _see(self, stored: StoredValue) -> None:
        if stored.base < self._compacted_end:
            return  # a node may be behind: `on_agreed` looks at these
        known = self._batches.get(stored.base)
        if known is not None or stored.base < self.end:
            if known is None or known.value != stored.value:
                was = "nothing" if known is None else f"the batch of epoch {known.epoch}"
                raise Violation(f"offset {stored.base}: committed is {was}, served that of epoch {stored.epoch}")
            return
        self._fix(stored)

    # ------------------------------------------------------------------------------------------ commits
    def _fix(self, stored: StoredValue) -> None:
        holders = [m for m in self._members if self._has_held(m, stored)]
        if 2 * len(holders) <= len(self._members):
            names = [int(m.node) for m in holders]
            raise Violation(f"the batch at {stored.base} of epoch {stored.epoch} is committed on the disks of {names}")
        lost = self._lost.get((stored.epoch, stored.base))
        if lost is not None:
            raise Violation(f"record {lost.number} was called lost, and is committed at {stored.base}")
        self.producers.on_committed(stored, self._transaction_of(stored))
        self._batches[stored.base] = stored
        self.end = stored.end

    def in_transaction(self, record: Record, transaction: Transaction) -> None:
        record.transaction = transaction
        self._in_transactions[record.text] = transaction

    def _transaction_of(self, stored: StoredValue) -> Transaction | None:
        return next((t for text, t in self._in_transactions.items() if text in stored.value), None)

    def _has_held(self, member: Member, stored: StoredValue) -> bool:
        image = self._image_of(member)
        on_disk = image.tables[Table.BATCHES].get(batch_key(self._pid, stored.base))
        return on_disk == stored.value or stored.value in self._gone[member]

    def is_rotten(self, member: Member) -> bool:
        """Its disk has batches that fail their CRC, or lacks some that its log counts, found or not."""
        image, replica = self._image_of(member), member.replica
        at = replica.log.first if replica is not None else None
        try:
            for value in (value for key, value in image.tables[Table.BATCHES].items() if key.startswith(self._pid)):
                stored = parse_value(self._pid, value)
                if at is not None and stored.end > at:
                    if stored.base != at:
                        return True
                    at = stored.end
        except DataDamaged:
            return True
        return replica is not None and at is not None and at < replica.log.durable_end

    def disk_goes(self, member: Member) -> None:
        """What its disk holds now may go. It was there when it was acknowledged."""
        image = self._image_of(member)
        rows = image.tables[Table.BATCHES]
        self._gone[member] |= {bytes(value) for value in rows.values()}

    def on_committed(self, part: PartitionState) -> None:
        """An entry of Raft is committed, and the partition is as it says from now on."""
        while self.end < part.hwm:
            self._fix(self._next_of(part, part.hwm))
        self._compacted_end = part.compacted_end
        self.producers.forget(part.producers_start)
        for stored in self._batches.values():
            if stored.end <= part.log_start:
                continue
            covered = part.epoch_range(stored.epoch)
            if covered is None or stored.base < covered[0] or (covered[1] is not None and stored.end > covered[1]):
                history = [(int(e.epoch), int(e.start)) for e in part.history]
                raise Violation(f"the batch at {stored.base} of epoch {stored.epoch} is cut off: {history}")

    def on_deleted(self, part: PartitionState, limit: str | None) -> None:
        """By retention, which an operator has limited to so many records, or has not."""
        if limit is None or part.hwm - part.log_start < int(limit):
            kept = limit if limit is not None else "all"
            raise Violation(f"[{part.log_start}, {part.hwm}) is left by retention, and {kept} records are to be kept")

    def on_agreed(self, records: Sequence[Record], part: PartitionState) -> None:
        """All replicas have the whole log. Sound disks hold the same bytes, and in them the last record of each key."""
        sound = [member for member in self._members if not member.disk.image.is_damaged]
        disks = {int(member.node): self._stored_on(member, part.log_start) for member in sound}
        if len({tuple(stored.value for stored in disk) for disk in disks.values()}) > 1:
            raise Violation(
                f"the disks differ: {[(node, [int(b.base) for b in disk]) for node, disk in disks.items()]}"
            )
        for (base, record), disk in product(self._last_of_keys(records).values(), disks.values()):
            is_kept = base >= part.log_start and not record.is_tombstone
            if is_kept and not any(record.text in stored.value for stored in disk):
                raise Violation(f"record {record.number} is the last of its key, and is gone")
        for replica in (member.replica for member in sound):
            if replica is not None:
                self.producers.judge_aborted(replica.log.aborted.covers, part.log_start)

    def _last_of_keys(self, records: Sequence[Record]) -> dict[bytes, tuple[Offset, Record]]:
        """Those that are committed, and not aborted."""
        last: dict[bytes, tuple[Offset, Record]] = {}
        for base, stored in sorted(self._batches.items()):
            kept = [r for r in records if r.text in stored.value and (not r.transaction or r.transaction.is_committed)]
            last |= {r.key: (base, r) for r in kept if r.key is not None}
        return last

    def look_at_tombstones(self, records: Sequence[Record], part: PartitionState) -> None:
        """One that is the last of its key goes only after no replica has what it deletes."""
        if not any(record.is_tombstone for record in records):
            return
        for base, tombstone in self._last_of_keys(records).values():
            if not tombstone.is_tombstone or base < part.log_start:
                continue
            disks = {m: self._stored_up_to(m, base) for m in self._members}
            had = [m for m in self._members if m.replica is not None and self._stored_end(m.replica) > base]
            gone = [int(m.node) for m in had if not m.disk.image.is_damaged and tombstone.text not in disks[m]]
            for earlier in records if gone else ():
                at = self._base_of(earlier)
                if earlier.key != tombstone.key or at is None or not part.log_start <= at < base:
                    continue
                if left := [int(m.node) for m, disk in disks.items() if earlier.text in disk]:
                    raise Violation(
                        f"nodes {left} have record {earlier.number}, and on nodes {gone} its tombstone is gone"
                    )

    def _stored_up_to(self, member: Member, base: Offset) -> bytes:
        """Without what is later. A producer that has expired may have sent a record again."""
        rows = self._image_of(member).tables[Table.BATCHES]
        return b"".join(value for key, value in rows.items() if base_of_key(key) <= base)

    def _stored_end(self, replica: Replica) -> Offset:
        """Up to there its disk has what is committed."""
        return min(replica.readable_end, replica.durable_verified_end)

    def _base_of(self, record: Record) -> Offset | None:
        """Of a record that is committed, and not aborted."""
        if record.transaction is not None and not record.transaction.is_committed:
            return None
        return next((base for base, stored in self._batches.items() if record.text in stored.value), None)

    def is_forgotten(self, record: Record, part: PartitionState) -> bool:
        """Whether a repetition of it is too late to be known as one."""
        base = self._base_of(record)
        return base is not None and base < part.producers_start

    def _image_of(self, member: Member) -> DiskImage:
        return member.disk.image if member.is_up else member.image

    def _stored_on(self, member: Member, log_start: Offset) -> list[StoredValue]:
        """Its committed batches from the log start on."""
        rows = member.disk.image.tables[Table.BATCHES]
        found = [parse_value(self._pid, value) for key, value in rows.items() if key.startswith(self._pid)]
        return sorted(
            (stored for stored in found if log_start < stored.end <= self.end), key=lambda stored: stored.base
        )

    def _next_of(self, part: PartitionState, known: Offset) -> StoredValue:
        """The batch after the committed ones that the history takes for right, on any disk."""
        for stored in self._stored_at(self.end):
            covered = part.epoch_range(stored.epoch)
            if covered is not None and covered[0] <= stored.base and (covered[1] is None or stored.end <= covered[1]):
                return stored
        raise Violation(f"{known} is taken for the commit point, and no disk has the batch at {self.end}")

    def _stored_at(self, offset: Offset) -> Iterable[StoredValue]:
        for member in self._members:
            image = self._image_of(member)
            value = image.tables[Table.BATCHES].get(batch_key(self._pid, offset))
            if value:
                try:
                    yield parse_value(self._pid, value)
                except DataDamaged:
                    continue

    # ------------------------------------------------------------------------------------------ producers, readers
    def on_acked(self, record: Record, base: Offset) -> None:
        record.is_acked = True
        stored = self._batches.get(base)
        if stored is None:
            raise Violation(f"record {record.number} is acknowledged at {base}, and {self.end} is committed")
        if record.text not in stored.value:
            raise Violation(f"record {record.number} is acknowledged at {base}, where another is committed")

    def on_lost(self, record: Record) -> None:
        record.is_lost = True
        stored = self._batches.get(record.base)
        if stored is not None and record.text in stored.value:
            raise Violation(f"record {record.number} is committed at {record.base}, and called lost")
        self._lost[record.epoch, record.base] = record

    def on_end(self, end: Offset, committed_before: Offset) -> None:
        """A linearizable answer to where the partition ends."""
        if end < committed_before:
            raise Violation(f"the end is said to be {end}, and {committed_before} was committed before the question")
