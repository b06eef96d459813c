"""Whether a producer's batch may be appended, in which form, and the errors that say why not.

Owns the checks of the batch itself, of its times, of space, of the number of producers, and of its transaction. The
last is KIP-890's: a batch is taken into a transaction only if the replicated state has that transaction open, with this
partition. So no late batch opens one that never ends. The leader judges by the state that it has applied, which may be
behind: that there is no transaction is certain only after a read barrier, or after it has had the partition join
(`transaction_joins`), for which the batch waits. That the state is past a transaction is certain.

Owns also the order in which an idempotent producer's batches are taken (`SendOrder`). A producer that a log does not
know may begin with any sequence. So if its first batch is refused, the ones that it sent right after it must be
refused, too: a log that took the second would refuse the first for ever. It must never append, or judge who leads: the
replica does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, ErrorDetails, RecordError, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId, ProducerId
from smq.raft_state.limits import OFFSET_MAX
from smq.raft_state.refusal import quoted
from smq.raft_state.state import ClusterState, PartitionState, TransactionPhase
from smq.raft_state.topic_config import (
    MIRRORED,
    TIMESTAMP_AFTER_MAX_MS,
    TIMESTAMP_BEFORE_MAX_MS,
    BatchRules,
    is_mirrored,
)
from smq.records import (
    INT32_MAX,
    MAGIC,
    TIMESTAMP_TYPE_MASK,
    BatchCorrupt,
    BatchError,
    BatchHeader,
    parse_header,
    validate_mirrored,
    validate_produced,
    with_append_time,
)
from smq.replication.host import Host
from smq.replication.log.decoding import decode_bounded
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.partition.intake import SpaceGuard
from smq.replication.ports import Buffer, Clock

NEW_PRODUCER_RETRY_MS: Final = 1_000  # producers expire in steps of a second and more
RECORD_ERRORS_MAX: Final = 10_000  # in one answer, a megabyte; the other records of the batch fail, too
AWAITED_MAX: Final = 10_000  # some 3 MB; beyond it, unknown producers must begin with sequence 0 for a while
# Producers that were refused come again within seconds. But the ones behind may each wait for room for a minute first.
# After this time the producer has given the batch up, and its later ones are judged as in Kafka.
AWAITED_NS_MAX: Final = 600_000_000_000
RETRY_MS: Final = 50
# Retriable in Kafka's terms, or sent again in smaller batches.
_SENT_AGAIN: Final = frozenset(
    {ErrorCode.CORRUPT_BATCH, ErrorCode.BATCH_TOO_LARGE, ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION}
)


class PreparedBatch(NamedTuple):
    """A producer's batch, as the replica is to append it, and what its topic asks of it. If the topic has the records
    looked at (`preparation`), `data` may be converted, `refusal` says why the batch cannot be taken, and `times` are
    the oldest and the newest timestamp of a record (None: no record has one, or the header's is enough)."""

    data: Buffer
    rules: BatchRules
    refusal: SmqError | None = None
    times: tuple[int, int] | None = None


# Refusals for what the log has, or does not have: a leader that has been deposed without knowing it may be wrong.
JUDGED_BY_THE_LOG: Final = (ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode.INVALID_TIMESTAMP, ErrorCode.OFFSET_TAKEN)


def as_appended(prepared: PreparedBatch, header: BatchHeader, ts_ns: int) -> tuple[Buffer, BatchHeader]:
    """The bytes to append at a time of the leader's, and their header; or the error of the batch's records. A batch
    that the log already holds is not judged again: its first attempt was taken, whatever the clock says now."""
    if prepared.refusal is not None:
        raise prepared.refusal
    if prepared.rules.is_append_time:
        return with_append_time(prepared.data, header, ts_ns // 1_000_000)
    if header.attributes & TIMESTAMP_TYPE_MASK:
        raise SmqError(ErrorCode.INVALID_TIMESTAMP, "the batch says LogAppendTime, and the topic has CreateTime")
    now_ms = ts_ns // 1_000_000
    if prepared.times is not None:
        _check_times(*prepared.times, now_ms, prepared.rules)
    elif header.max_timestamp - now_ms > prepared.rules.after_ms:
        _check_times(now_ms, header.max_timestamp, now_ms, prepared.rules)
    return prepared.data, header


def _check_times(oldest_ms: int, newest_ms: int, now_ms: int, rules: BatchRules) -> None:
    message = _time_refusal(oldest_ms, now_ms, rules) or _time_refusal(newest_ms, now_ms, rules)
    if message:
        raise SmqError(ErrorCode.INVALID_TIMESTAMP, message)


def _time_refusal(timestamp: int, now_ms: int, rules: BatchRules) -> str:
    """Why a record may not have this timestamp; "" if it may."""
    if now_ms - timestamp > rules.before_ms:
        direction, limit = "behind", f"{TIMESTAMP_BEFORE_MAX_MS}={rules.before_ms}"
    elif timestamp - now_ms > rules.after_ms:
        direction, limit = "ahead of", f"{TIMESTAMP_AFTER_MAX_MS}={rules.after_ms}"
    else:
        return ""
    return f"timestamp {timestamp} is {abs(now_ms - timestamp)} ms {direction} the leader's clock: {limit}"


def with_bad_records(error: SmqError, batch: Buffer, rules: BatchRules, now_ms: int) -> SmqError:
    """The refusal of a batch for its records, with those that are to blame (KIP-467): clients fail these alone with it,
    and the others with a code of their own. As it was, if no record can be named. As in Kafka, a bad time decides the
    code. Pure: it runs on any thread, because it decompresses the batch."""
    found, has_bad_time = [], False
    try:
        header = parse_header(batch)
        is_claimed = bool(header.attributes & TIMESTAMP_TYPE_MASK)
        for index, record in enumerate(decode_bounded(memoryview(batch))):
            message = ""
            if rules.needs_keys and record.key is None:
                message = "it has no key, and a compacted topic keeps the last record of each key"
            elif is_claimed and not rules.is_append_time:
                message, has_bad_time = "it says LogAppendTime, and the topic has CreateTime", True
            elif record.timestamp_ms >= 0 and not rules.is_append_time:
                message = _time_refusal(record.timestamp_ms, now_ms, rules)
                has_bad_time = has_bad_time or bool(message)
            if message:
                found.append(RecordError(index, message))
                if len(found) == RECORD_ERRORS_MAX:
                    break
    except Exception:  # noqa: BLE001 - the bytes are a producer's: what does not decode was refused for that
        return error
    if not found:
        return error
    code = ErrorCode.INVALID_TIMESTAMP if has_bad_time else error.code
    first = f"record {found[0].place} of the batch: {found[0].message}"
    others = f", and {len(found) - 1} more of its {header.count} records are bad" if len(found) > 1 else ""
    return SmqError(code, first + others, replace(error.details, records=tuple(found)))


def leader_error(asked_node: NodeId, state: ClusterState, part: PartitionState) -> SmqError:
    """NOT_LEADER with the leader, or LEADER_UNAVAILABLE if the epoch's leader cannot lead."""
    leader = state.nodes.get(part.leader)
    if leader is None or leader.fenced or leader.incarnation != part.leader_incarnation or leader.node == asked_node:
        details = ErrorDetails(retry_after_ms=100)
        return SmqError(ErrorCode.LEADER_UNAVAILABLE, "the partition has no leader at present", details)
    details = ErrorDetails(leader=leader.node, leader_address=leader.grpc_address)
    return SmqError(ErrorCode.NOT_LEADER, f"node {leader.node} leads the partition", details)


def full_elsewhere(node: NodeId) -> SmqError:
    message = (
        f"node {node} has no space for records, and too few replicas are left for a majority: delete topics or "
        "records, or free space on its disk. `smq status` says how many bytes must still go"
    )
    return SmqError(ErrorCode.STORAGE_FULL, message)


def check_space(space: SpaceGuard, me: NodeId, part: PartitionState, full: Sequence[NodeId], size: int) -> None:
    """STORAGE_FULL if this disk takes no records, or if too few followers' disks do for a majority. `full` are the
    followers whose disks take none."""
    if not space.admits(size):
        raise space.refusal(me)
    if len(part.replicas) - len(full) <= len(part.replicas) // 2:
        raise full_elsewhere(full[0])


def check_room(host: Host, held: int, log: PartitionLog, header: BatchHeader) -> None:
    """TOO_MANY_PRODUCERS if this would be one more than this node may remember: it remembers `held`. Followers take
    what their leader has taken. The batch has a producer's id."""
    limit = host.config.producers_max
    if held < limit or log.producers.knows(header.producer_id, Offset(-1)):
        return
    raise SmqError(
        ErrorCode.TOO_MANY_PRODUCERS,
        f"node {host.node_id} remembers {held} producers, its limit is {limit} (producers_max): idempotent"
        " producers that are new to the partition have to wait until others have expired",
        ErrorDetails(retry_after_ms=NEW_PRODUCER_RETRY_MS),
    )


def check_writer(config: Mapping[str, str], *, is_mirror: bool) -> None:
    if is_mirror and not is_mirrored(config):
        raise SmqError(ErrorCode.WRONG_WRITER, f"the topic has producers of its own: {MIRRORED}=true would end that")
    if not is_mirror and is_mirrored(config):
        raise SmqError(ErrorCode.WRONG_WRITER, "the topic is a copy of another cluster's")


def check_place(log: PartitionLog, header: BatchHeader) -> None:
    """A mirrored batch goes to the end of the log, at its own offset. OFFSET_OUT_OF_RANGE, OFFSET_TAKEN."""
    base, end = header.base_offset, log.appended_end
    details = ErrorDetails(lo=log.log_start, hi=end)
    if base > end:
        message = f"the batch begins at offset {base}, and the log ends at {end}: what is between comes first"
        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, message, details)
    if base < end:
        raise SmqError(ErrorCode.OFFSET_TAKEN, f"the log has offset {base} already: it ends at {end}", details)
    if header.end > OFFSET_MAX:
        raise SmqError(ErrorCode.INVALID_OFFSET, f"the batch ends at {header.end}, above {OFFSET_MAX}", details)


def validated(prepared: PreparedBatch) -> BatchHeader:
    """The header of a batch that is right in itself, and not larger than its topic allows."""
    batch, limit = prepared.data, prepared.rules.bytes_max
    if len(batch) > limit:
        raise SmqError(ErrorCode.BATCH_TOO_LARGE, f"the batch has {len(batch)} bytes, the limit is {limit}")
    try:
        return validate_mirrored(batch) if prepared.rules.is_mirrored else validate_produced(batch)
    except BatchCorrupt as e:
        raise SmqError(ErrorCode.CORRUPT_BATCH, str(e)) from e
    except BatchError as e:
        raise SmqError(ErrorCode.INVALID_BATCH, str(e)) from e


class NotYetKnown(SmqError):
    """Certain only after a barrier, or a join: the state is then as of now."""


def check_transaction(
    state: ClusterState, pid: PartitionId, table: ProducerTable, header: BatchHeader, named: str | None
) -> None:
    """INVALID_TRANSACTION_STATE, UNKNOWN_TRANSACTIONAL_ID, PRODUCER_FENCED: NotYetKnown if the state may be behind.
    `named` is the transactional id of the request, if it has one. A producer id never moves to another."""
    if header.producer_id < 0:
        return
    transaction = state.transaction_of(ProducerId(header.producer_id))
    if not header.is_transactional:
        if table.open_from(header.producer_id) is not None:
            raise SmqError(
                ErrorCode.INVALID_TRANSACTION_STATE,
                f"producer {header.producer_id} has an open transaction here: the batch must be part of it",
            )
        return
    if transaction is None:
        raise NotYetKnown(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID, f"producer {header.producer_id} has no transactional id, or no longer"
        )
    if named is not None and named != transaction.transactional_id:
        raise SmqError(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
            f"there is no transactional id {quoted(named)} of producer {header.producer_id}",
        )
    if header.producer_id != transaction.producer_id:
        raise SmqError(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} has used up its epochs, and goes on as {transaction.producer_id}",
        )
    if header.producer_epoch < transaction.producer_epoch:
        raise SmqError(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} is in epoch {transaction.producer_epoch}, the batch has the older"
            f" {header.producer_epoch}",
        )
    if header.producer_epoch > transaction.producer_epoch:
        raise NotYetKnown(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} is in epoch {transaction.producer_epoch}: the {header.producer_epoch} of"
            " the batch has not been given to any producer",
        )
    if transaction.phase is not TransactionPhase.ONGOING or pid not in transaction.partitions:
        raise NotYetKnown(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"producer {header.producer_id} has no open transaction that includes this partition",
        )


# ------------------------------------------------------------------------------------------- order of sending
class _Awaited(NamedTuple):
    epoch: int
    sequence: int
    until_ns: int


def comes_again(code: ErrorCode) -> bool:
    """Whether a producer sends a batch again, in the same session, after this error."""
    return code.is_retriable or code in _SENT_AGAIN


def is_before(a: int, b: int) -> bool:
    """Whether sequence `a` is sent before `b`; sequences wrap."""
    return a != b and (b - a) & INT32_MAX <= INT32_MAX // 2


class SendOrder:
    """Which batches of idempotent producers were refused and have not come again yet, and so which later ones to
    refuse until then. It is the memory of one process: a connection to another process brings the batches again from
    the first refused one on. It must never refuse what the log's own table of producers can judge."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._awaited: dict[tuple[PartitionId, int], _Awaited] = {}  # by partition and producer, the oldest first
        self._unplaced: dict[tuple[str, int], list[BatchHeader]] = {}  # by the name of a topic that is unknown here
        self._unplaced_count = 0
        self._lost_count_until_ns = 0  # some batch could not be remembered; see AWAITED_MAX

    # ------------------------------------------------------------------------------------------ refusals
    def expect(self, pid: PartitionId, batch: Buffer | BatchHeader) -> None:
        """The batch has been refused, or is held back: until it comes, those that its producer sent after it wait."""
        header = _idempotent(batch)
        if header is None:
            return
        now_ns, key = self._clock.monotonic_ns(), (pid, header.producer_id)
        known = self._awaited.get(key)
        if known is not None and known.until_ns > now_ns and not _replaces(header, known):
            return
        self._awaited.pop(key, None)
        self._make_room(now_ns)
        if len(self._awaited) < AWAITED_MAX:
            self._awaited[key] = _Awaited(header.producer_epoch, header.base_sequence, now_ns + AWAITED_NS_MAX)
        else:
            self._lost_count_until_ns = now_ns + AWAITED_NS_MAX

    def _make_room(self, now_ns: int) -> None:
        while self._awaited:
            oldest = next(iter(self._awaited))
            if self._awaited[oldest].until_ns > now_ns:
                return
            del self._awaited[oldest]

    def expect_by_name(self, topic: str, index: int, batch: Buffer) -> None:
        """As `expect`, for a partition that this node does not know yet."""
        header = _idempotent(batch)
        if header is None:
            return
        if self._unplaced_count >= AWAITED_MAX:
            self._lost_count_until_ns = self._clock.monotonic_ns() + AWAITED_NS_MAX
            self._unplaced.clear()  # it is no memory for names that never come into being
            self._unplaced_count = 0
        self._unplaced.setdefault((topic, index), []).append(header)
        self._unplaced_count += 1

    def place(self, topic: str, index: int, pid: PartitionId) -> None:
        """The partition of this name is known now."""
        if self._unplaced:
            headers = self._unplaced.pop((topic, index), [])
            self._unplaced_count -= len(headers)
            for header in headers:
                self.expect(pid, header)

    # ------------------------------------------------------------------------------------------ arrivals
    def check(self, pid: PartitionId, header: BatchHeader, table: ProducerTable, start: Offset) -> CachedBatch | None:
        """As `table.check`; also OVERLOADED for a batch that overtook a refused one."""
        if not self._awaited and not self._lost_count_until_ns:
            return table.check(header, start)
        now_ns, key = self._clock.monotonic_ns(), (pid, header.producer_id)
        awaited = self._awaited.get(key)
        if awaited is not None and (awaited.until_ns <= now_ns or awaited.epoch < header.producer_epoch):
            del self._awaited[key]
            awaited = None
        expected = table.next_sequence(header, start)
        if awaited is not None and awaited.epoch == header.producer_epoch:
            # What the log holds of this epoch already may be beyond the awaited batch: another leader has taken it.
            is_next = expected is None or expected == awaited.sequence
            if is_next and is_before(awaited.sequence, header.base_sequence):
                raise _overtaken(f"batch {awaited.sequence} of producer {header.producer_id} was refused")
        elif expected is None and header.base_sequence > 0 and now_ns < self._lost_count_until_ns:
            raise _overtaken(f"batches of many producers were refused, perhaps the first of {header.producer_id}")
        return table.check(header, start)

    def came(self, pid: PartitionId, header: BatchHeader) -> None:
        """The batch is in the log."""
        awaited = self._awaited.get((pid, header.producer_id)) if self._awaited else None
        if awaited is not None and (awaited.epoch, awaited.sequence) == (header.producer_epoch, header.base_sequence):
            del self._awaited[pid, header.producer_id]


def _replaces(header: BatchHeader, known: _Awaited) -> bool:
    if header.producer_epoch != known.epoch:
        return header.producer_epoch > known.epoch
    return not is_before(known.sequence, header.base_sequence)


def _idempotent(batch: Buffer | BatchHeader) -> BatchHeader | None:
    """Its header, if the batch has a sequence. The rest of it may be damaged."""
    if not isinstance(batch, BatchHeader):
        try:
            batch = parse_header(batch)
        except BatchCorrupt:
            return None
    return batch if batch.magic == MAGIC and batch.producer_id >= 0 and batch.base_sequence >= 0 else None


def _overtaken(reason: str) -> SmqError:
    message = f"{reason} and has to come first"
    return SmqError(ErrorCode.OVERLOADED, message, ErrorDetails(retry_after_ms=RETRY_MS))
