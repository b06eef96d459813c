"""Which batches of idempotent producers were refused and have not come again yet.

A producer that a log does not know may begin with any sequence. So if its first batch is refused, the ones that it sent
right after it must be refused, too: a log that took the second would refuse the first for ever. This owns the memory of
such batches, per producer and partition, and the decision which later ones to refuse until then. It is the memory of
one process: a connection to another process brings the batches again from the first refused one on. It must never
refuse what the log's own table of producers can judge. `replicas` owns it; replicas and requests use it.
"""

from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.records import INT32_MAX, MAGIC, BatchCorrupt, BatchHeader, Buffer, parse_header
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.ports import Clock

AWAITED_MAX: Final = 10_000  # some 3 MB; beyond it, unknown producers must begin with sequence 0 for a while
# Producers that were refused come again within seconds. But the ones behind may each wait for room for a minute first.
# After this time the producer has given the batch up, and its later ones are judged as in Kafka.
AWAITED_NS_MAX: Final = 600_000_000_000
RETRY_MS: Final = 50
# Retriable in Kafka's terms, or sent again in smaller batches.
_SENT_AGAIN: Final = frozenset(
    {ErrorCode.CORRUPT_BATCH, ErrorCode.BATCH_TOO_LARGE, ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION}
)


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
