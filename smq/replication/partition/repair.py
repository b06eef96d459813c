"""Damaged batches, fetched again from a replica that has them intact.

Owns every repair under way on a node: the replica to ask next, the callers that wait for the outcome, and the counters.
A batch is accepted only after its CRC and its epoch have been checked, and only in place of that very batch
(PartitionLog.replace). It must never serve, truncate or count anything: a damaged batch is not served until it is
intact on this disk again.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.replication.host import Host
from smq.replication.log.segments import NO_DIGEST
from smq.replication.log.stored_batch import BatchDamaged, StoredValue, parse_value
from smq.replication.net import wire
from smq.replication.partition.intake import Intake
from smq.replication.partition.replica import Replica
from smq.replication.ports import Buffer, Channel, DataDamaged
from smq.replication.runtime.deadlines import Deadline

_log = structlog.get_logger("smq.repair")

ANSWER_NS_MAX: Final = 1_000_000_000  # per replica, then the next is asked, too: a batch and a disk read
# After the first question: late answers count as long as a reader waits for a disk (reads.READ_MS_MAX).
OPEN_NS_MAX: Final = 5_000_000_000
REPAIRS_MAX: Final = 1_000  # under way together; the next read meets further damage again
RETRY_MS: Final = 200  # advice to a reader if no replica could be asked
# A batch that fails again after its repair lies in a tree that is out of order: repairs of it end.
REPEATS_MAX: Final = 5  # each within REMEMBERED_NS of the one before
REMEMBERED_NS: Final = 10_000_000_000  # a reader that needs the batch tries once per second, or more often


class Outcome(enum.Enum):
    """The result of a repair."""

    REPAIRED = "repaired"
    NO_REPLICA = "no replica"  # every other replica reports that it cannot serve the batch either
    UNKNOWN = "unknown"  # some replica could not be asked, or may have it but could not say so
    INEFFECTIVE = "ineffective"  # the batch fails again after every repair
    DELETED = "deleted"  # the log start has passed the batch meanwhile: a reader learns that by reading again


READ_AGAIN: Final = (Outcome.REPAIRED, Outcome.DELETED)


@dataclass(slots=True)
class RepairCounts:
    """Counters since the start of this process."""

    found: int = 0  # damaged batches, each counted once while it is being repaired
    repaired: int = 0
    failed: int = 0  # repairs that ended without the batch


@dataclass(slots=True, eq=False)
class _Repair:
    replica: Replica
    damage: BatchDamaged
    offset: Offset  # in the batch, and not below log_start: may be asked for
    waiting: list[Callable[[Outcome], None]]
    unasked_peers: list[NodeId]  # replicas that have not been asked yet, the next one last
    open_until_ns: int
    request: int = 0  # the newest
    asked: dict[int, NodeId] = field(default_factory=dict)  # requests without an answer yet, one per replica at most
    deadline: Deadline | None = None
    is_uncertain: bool = False  # some replica could not be asked, or may have the batch later


class Repairs:
    def __init__(self, host: Host, intake: Intake, mark_durable: Callable[[PartitionId], None]) -> None:
        self._host = host
        self._intake = intake
        self._mark_durable = mark_durable
        self._under_way: dict[tuple[PartitionId, Offset], _Repair] = {}
        self._request = 0
        self._repaired: dict[tuple[PartitionId, Offset], tuple[int, int]] = {}  # count and last time; REPAIRS_MAX
        self.counts = RepairCounts()

    def request(self, replica: Replica, damage: BatchDamaged, done: Callable[[Outcome], None]) -> None:
        """Begins to repair the batch, or joins the repair under way. `done` is called later, once."""
        if damage.row is None and damage.offset < min(replica.log.log_start, replica.log.segments.compacted_end):
            self._have_segment_fetched(replica, damage)
            self._host.deliver(partial(done, Outcome.UNKNOWN))
            return
        offset = max(damage.offset, replica.log.log_start)
        key = (damage.pid, offset)
        repair = self._under_way.get(key)
        if repair is not None:
            repair.waiting.append(done)
            return
        if len(self._under_way) >= REPAIRS_MAX or not self._intake.has_room:
            self._host.deliver(partial(done, Outcome.UNKNOWN))
            return
        if self._is_ineffective(key):
            self._host.deliver(partial(done, Outcome.INEFFECTIVE))
            return
        self.counts.found += 1
        _log.warning("damage found", node=self._host.node_id, what=str(damage))
        part = replica.part
        others = [n for n in part.replicas if n not in (self._host.node_id, part.leader)]
        if part.leader != self._host.node_id:
            others.append(part.leader)  # the last is asked first
        open_until_ns = self._host.clock.monotonic_ns() + OPEN_NS_MAX
        repair = self._under_way[key] = _Repair(replica, damage, offset, [done], others, open_until_ns)
        if damage.row is not None and not damage.offset < replica.log.durable_end:
            replica.log.forget_row(damage.row, partial(self._on_durable, repair))
        elif damage.row is None or not self._read_own(repair):
            self._ask_next(repair)

    def _have_segment_fetched(self, replica: Replica, damage: BatchDamaged) -> None:
        """A batch below the log start is there because its compacted segment is kept in whole. No other replica can be
        asked for it: FetchBatch begins at the log start. So the segment comes again."""
        if replica.log.segments.digest_at(damage.offset) != NO_DIGEST:
            _log.warning("damage found in a compacted segment", node=self._host.node_id, what=str(damage))
            replica.log.segments.doubt(damage.offset)

    def _is_ineffective(self, key: tuple[PartitionId, Offset]) -> bool:
        count, at_ns = self._repaired.get(key, (0, 0))
        if count and self._host.clock.monotonic_ns() - at_ns >= REMEMBERED_NS:
            del self._repaired[key]
        return self._repaired.get(key, (0, 0))[0] >= REPEATS_MAX

    def _note_repaired(self, key: tuple[PartitionId, Offset], what: BatchDamaged) -> None:
        count = self._repaired.pop(key, (0, 0))[0] + 1
        self._repaired[key] = count, self._host.clock.monotonic_ns()
        if len(self._repaired) > REPAIRS_MAX:
            del self._repaired[next(iter(self._repaired))]
        if count == REPEATS_MAX:
            _log.error(
                "repaired repeatedly without effect: empty this directory", node=self._host.node_id, what=str(what)
            )

    def forget(self, pid: PartitionId) -> None:
        """The partition is gone."""
        for repair in [r for (p, _), r in self._under_way.items() if p == pid]:
            self._finish(repair, Outcome.UNKNOWN)

    # ------------------------------------------------------------------------------------------- asking
    def _read_own(self, repair: _Repair) -> bool:
        """If only the index row is damaged, the batch is here. False if it cannot be read now."""

        def on_read(found: list[StoredValue] | DataDamaged | None) -> None:
            own = found[0] if found and not isinstance(found, DataDamaged) else None
            if self._under_way.get((repair.damage.pid, repair.offset)) is repair and not self._accept(repair, own):
                self._ask_next(repair)

        return repair.replica.log.read_later(repair.offset, Offset(repair.offset + 1), 1, on_read) is not None

    def _ask_next(self, repair: _Repair) -> None:
        host = self._host
        while repair.unasked_peers:
            peer = repair.unasked_peers.pop()
            self._request += 1
            message = wire.FetchBatch(repair.damage.pid, self._request, repair.offset)
            if host.links.is_open(peer, Channel.DATA) and host.links.send(peer, Channel.DATA, message):
                repair.request = self._request
                repair.asked[repair.request] = peer
                self._expire_at(repair, host.clock.monotonic_ns() + ANSWER_NS_MAX)
                return
            repair.is_uncertain = True
        may_come = any(host.links.is_open(peer, Channel.DATA) for peer in repair.asked.values())
        if may_come and host.clock.monotonic_ns() < repair.open_until_ns:
            self._expire_at(repair, repair.open_until_ns)
            return
        is_unknown = repair.is_uncertain or bool(repair.asked)
        self._finish(repair, Outcome.UNKNOWN if is_unknown else Outcome.NO_REPLICA)

    def _expire_at(self, repair: _Repair, at_ns: int) -> None:
        if repair.deadline is not None:
            repair.deadline.cancel()
        repair.deadline = self._host.deadlines.add(at_ns, partial(self._ask_next, repair))

    def on_found(self, peer: NodeId, message: wire.FoundBatch) -> None:
        """Any question of a repair under way may be answered, and only by the replica that was asked. Bytes that fail
        their CRC, or are of another batch, count as no answer."""
        for repair in self._under_way.values():
            if repair.asked.get(message.request) == peer:
                break
        else:
            return
        del repair.asked[message.request]
        if not self._intake.has_room:
            self._finish(repair, Outcome.UNKNOWN)  # the reader or the next visit asks again
            return
        repair.is_uncertain |= message.may_have
        value: StoredValue | None = None
        if message.value and not _is_of(message.segment, repair.replica, repair.offset):
            repair.is_uncertain = True  # the two are compacted differently, for now
        elif message.value:
            try:
                value = parse_value(repair.damage.pid, bytes(message.value))
            except DataDamaged as e:
                _log.warning("a replica sent damaged bytes", peer=peer, what=str(e))
        if self._accept(repair, value):
            self._ask_no_more(repair)
        elif message.request == repair.request or not repair.asked:
            self._ask_next(repair)

    def _ask_no_more(self, repair: _Repair) -> None:
        repair.asked.clear()
        if repair.deadline is not None:
            repair.deadline.cancel()

    def _accept(self, repair: _Repair, value: StoredValue | None) -> bool:
        if value is None or not value.base <= repair.offset < value.end:
            return False
        log = repair.replica.log
        if not log.replace(value, repair.damage.row, partial(self._on_durable, repair)):
            repair.is_uncertain |= log.is_installing  # it takes the batch afterwards, or no longer needs it
            return False
        self._intake.took(len(value.value))
        return True

    def _on_durable(self, repair: _Repair) -> None:
        self.counts.repaired += 1
        self._note_repaired((repair.damage.pid, repair.offset), repair.damage)
        _log.info("damage repaired", node=self._host.node_id, what=str(repair.damage))
        self._mark_durable(repair.damage.pid)
        self._finish(repair, Outcome.REPAIRED)

    def _finish(self, repair: _Repair, outcome: Outcome) -> None:
        if self._under_way.pop((repair.damage.pid, repair.offset), None) is None:
            return
        self._ask_no_more(repair)
        if repair.offset < repair.replica.log.log_start:
            outcome = Outcome.DELETED
        elif outcome is not Outcome.REPAIRED:
            self.counts.failed += 1
            # A compacted segment comes as a whole then: other logs may have other bytes there.
            repair.replica.log.segments.doubt(repair.offset)
        for done in repair.waiting:
            self._host.deliver(partial(done, outcome))

    # ---------------------------------------------------------------------------------------- answering
    def on_fetch(self, peer: NodeId, replica: Replica | None, message: wire.FetchBatch) -> None:
        """Another replica has lost a batch: sends it only if it is valid, intact and durable here. Only if the batch is
        damaged here, too, it cannot help. Otherwise its state or the other's is behind, its log has yet to grow or to
        be verified, its disk has too much to read, or too much waits on the link: the other may ask again."""
        # Streams stop at half of this: they could keep a link that full for long, and repairs must not wait for that.
        backlog_max = 2 * self._host.config.replica_inflight_bytes_max

        def answer(value: Buffer, *, may_have: bool) -> None:
            if value and self._host.links.backlog_bytes(peer, Channel.DATA) >= backlog_max:
                value, may_have = b"", True
            segment = NO_DIGEST if replica is None else replica.log.segments.digest_at(message.offset)
            found = wire.FoundBatch(message.partition, message.request, may_have, value, segment)
            self._host.links.send(peer, Channel.DATA, found)

        def on_read(found: list[StoredValue] | DataDamaged | None) -> None:
            if isinstance(found, BatchDamaged) and replica is not None:
                self.request(replica, found, lambda _outcome: None)
            if isinstance(found, DataDamaged):
                answer(b"", may_have=False)
            elif replica is not None and found and found[0].end <= replica.durable_verified_end:
                answer(found[0].value, may_have=False)
            else:
                answer(b"", may_have=True)

        at = message.offset
        if replica is None or not replica.log.log_start <= at < replica.durable_verified_end:
            answer(b"", may_have=True)
            return
        if replica.log.is_installing:  # the digest may not be that of the bytes on the disk
            answer(b"", may_have=True)
            return
        in_memory = replica.log.read_memory(at, Offset(at + 1), 1)
        if in_memory is not None or replica.log.read_later(at, Offset(at + 1), 1, on_read) is None:
            on_read(in_memory)


def _is_of(segment: bytes, replica: Replica, offset: Offset) -> bool:
    """Whether a batch of that segment in another log is the one that this log had at the offset. If this log no longer
    holds its segment, the other log may not hold it either, and have what was there before it: the segment comes as a
    whole."""
    own = replica.log.segments.digest_at(offset)
    compacted_end = max(replica.part.compacted_end, replica.log.segments.compacted_end)
    return segment == own and (own != NO_DIGEST or offset >= compacted_end)


def repair_error(damage: BatchDamaged, outcome: Outcome) -> SmqError:
    """For a reader whose batch could not be repaired."""
    if outcome is Outcome.NO_REPLICA:
        return SmqError(ErrorCode.DATA_DAMAGED, f"{damage}; no other replica has it intact")
    if outcome is Outcome.INEFFECTIVE:
        message = f"{damage}; repairs in this node's directory have no effect: empty it, and start the node again"
        return SmqError(ErrorCode.DATA_DAMAGED, message)
    message = f"{damage}; it is fetched again once a replica that has it can be reached"
    return SmqError(ErrorCode.NODE_NOT_READY, message, ErrorDetails(retry_after_ms=RETRY_MS))
