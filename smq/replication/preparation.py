"""Batches whose topic has their records looked at before they are appended: converted to a codec, or judged by time.

Owns the order: while a batch of a partition is under way, later ones of it wait behind it, so none overtakes. The work
runs off the loop, under a bound on batches and bytes. It must never append or judge who leads: the replica does, and
also gives the errors of a batch that is not right in itself. The node's requests own it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import PartitionId
from smq.raft_state.topic_config import BatchRules
from smq.records import BatchHeader
from smq.replication.log.decoding import converted, decode_bounded
from smq.replication.partition.admission import Offer, validated
from smq.replication.ports import Buffer, Compute

BATCHES_MAX: Final = 1_000  # under way on this node: at 1 ms each, a second of one thread
BYTES_MAX: Final = 64 << 20  # of them, as they were sent: as much as may wait for the disk
RETRY_MS: Final = 50


@dataclass(slots=True, eq=False)
class _Entry:
    offer: Offer
    use: Callable[[Offer | SmqError], None]
    is_ready: bool


class Preparation:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._waiting: dict[PartitionId, deque[_Entry]] = {}
        self._count = self._bytes = 0
        self._closed: SmqError | None = None

    def concerns(self, pid: PartitionId, rules: BatchRules) -> bool:
        """False for a batch that can be offered to the replica as it is, now."""
        return rules.codec is not None or rules.has_time_limits or pid in self._waiting

    def start(
        self, pid: PartitionId, batch: Buffer, rules: BatchRules, use: Callable[[Offer | SmqError], None]
    ) -> None:
        """Calls `use` once, later, in the order of these calls for each partition: with the offer, or with why there
        is none. OVERLOADED if too much is under way. `use` must not raise."""
        if self._closed is not None:
            raise self._closed
        if self._count >= BATCHES_MAX or self._bytes >= BYTES_MAX:
            raise SmqError(
                ErrorCode.OVERLOADED, "too many batches wait to be converted", ErrorDetails(retry_after_ms=RETRY_MS)
            )
        entry = _Entry(Offer(batch, rules), use, is_ready=rules.codec is None and not rules.has_time_limits)
        self._waiting.setdefault(pid, deque()).append(entry)
        self._count += 1
        self._bytes += len(batch)
        if not entry.is_ready:
            self._compute.run(partial(prepared, entry.offer), partial(self._on_prepared, pid, entry, len(batch)))
        else:
            self._bytes -= len(batch)

    def _on_prepared(self, pid: PartitionId, entry: _Entry, size: int, offer: Offer) -> None:
        self._bytes -= size
        entry.offer, entry.is_ready = offer, True
        entries = self._waiting.get(pid)
        while entries and entries[0].is_ready:
            first = entries.popleft()
            self._count -= 1
            if not entries:
                del self._waiting[pid]  # first: `use` may start another one
            first.use(first.offer)

    def close(self, error: SmqError) -> None:
        """None of them has been appended."""
        self._closed = error
        waiting, self._waiting = self._waiting, {}
        for entries in waiting.values():
            for entry in entries:
                entry.use(error)


def prepared(offer: Offer) -> Offer:
    """The offer with its records looked at. Pure: it runs on any thread. A batch that is not right in itself comes
    back as it is, and is refused like any other."""
    batch, rules = offer.data, offer.rules
    try:
        header = validated(offer)
    except SmqError:
        return offer
    try:
        times = _times(batch, header) if rules.has_time_limits else None
        if rules.codec is not None and rules.codec != header.codec:
            batch = converted(batch, header, rules.codec, rules.level)
            if len(batch) > rules.bytes_max:
                raise SmqError(
                    ErrorCode.BATCH_TOO_LARGE,
                    f"the batch has {len(batch)} bytes in the topic's compression.type, the limit is {rules.bytes_max}",
                )
    except SmqError as e:
        return Offer(offer.data, rules, refusal=e)
    except Exception as e:  # noqa: BLE001 - the bytes are a producer's: whatever a codec raises, the batch is to blame
        message = f"the records of the batch do not decode: {e}"
        return Offer(offer.data, rules, refusal=SmqError(ErrorCode.INVALID_BATCH, message))
    return Offer(batch, rules, times=times)


def _times(batch: Buffer, header: BatchHeader) -> tuple[int, int] | None:
    """The oldest and the newest timestamp; None if no record has one. What the header says counts, too: retention goes
    by it."""
    found = [record.timestamp_ms for record in decode_bounded(memoryview(batch))]
    if len(found) != header.count:
        raise ValueError(f"there are {len(found)}, and the header says {header.count}")
    stamped = [timestamp for timestamp in (*found, header.max_timestamp) if timestamp >= 0]
    return (min(stamped), max(stamped)) if stamped else None
