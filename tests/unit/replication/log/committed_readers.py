"""How Kafka's clients leave out what was aborted: models of their ways to read what is committed.

Owns these models. Each is given the batches and the aborted transactions of one fetch, and returns the offsets of the
batches that it keeps. It must never look at anything else: a client knows no more.
"""

from bisect import bisect_left
from collections.abc import Callable

from smq.raft_state.ids import Offset
from smq.records import parse_header
from smq.replication.api import Aborted, StoredBatch
from smq.replication.log.aborted import AbortedTransactions, with_batches
from smq.replication.log.stored_batch import BatchKind, StoredValue, info_of_stored


def java(values: list[StoredValue], aborted: list[Aborted]) -> set[int]:
    """A set of producers: each enters at the first offset of a transaction, and leaves where a control batch aborts."""
    waiting, leaving_out, kept = sorted(aborted, key=lambda a: a.first), set[int](), set[int]()
    for value in values:
        info = info_of_stored(value)
        if info.producer_id >= 0:
            while waiting and waiting[0].first < value.end:
                leaving_out.add(waiting.pop(0).producer_id)
            if info.kind == BatchKind.ABORT:
                leaving_out.discard(info.producer_id)
            if info.kind == BatchKind.TRANSACTIONAL and info.producer_id in leaving_out:
                continue
        if info.kind <= BatchKind.TRANSACTIONAL:
            kept.add(value.base)
    return kept


def lists(values: list[StoredValue], aborted: list[Aborted]) -> set[int]:
    """librdkafka and franz-go: a list for each producer, of which each control batch that aborts takes the first."""
    firsts: dict[int, list[int]] = {}
    for entry in sorted(aborted, key=lambda a: a.first):
        firsts.setdefault(entry.producer_id, []).append(entry.first)
    kept = set[int]()
    for value in values:
        info = info_of_stored(value)
        own = firsts.get(info.producer_id, [])
        is_left_out = bool(own) and own[0] <= value.base
        if info.kind == BatchKind.ABORT and is_left_out:
            own.pop(0)
        elif info.kind == BatchKind.PLAIN or (info.kind == BatchKind.TRANSACTIONAL and not is_left_out):
            kept.add(value.base)
    return kept


READERS: tuple[Callable[[list[StoredValue], list[Aborted]], set[int]], ...] = (java, lists)


def of_fetch(values: list[StoredValue], aborted: AbortedTransactions) -> list[Aborted]:
    """The aborted transactions that a fetch of these batches names."""
    if not values:
        return []
    batches = [StoredBatch(v.base, Offset(v.end - 1), v.ts_ns, v.batch) for v in values]
    return with_batches(aborted.within(values[0].base, values[-1].end), batches)


def check_readers(values: list[StoredValue], aborted: AbortedTransactions, hidden: Callable[[int], bool]) -> None:
    """Every reader, of every stretch of these batches, keeps those with records that are not hidden, and no others."""
    full = [v.base for v in values if parse_header(v.batch).count and info_of_stored(v).kind <= BatchKind.TRANSACTIONAL]
    visible = [base for base in full if not hidden(base)]
    for start in range(len(values)):
        for stop in {start + 1, (start + len(values) + 1) // 2, len(values)}:
            fetched = values[start:stop]
            named = of_fetch(fetched, aborted)
            lo = bisect_left(visible, fetched[0].base) if fetched else 0
            expected = {base for base in visible[lo:] if base < fetched[-1].end} if fetched else set()
            for reader in READERS:
                assert reader(fetched, named) & set(full) == expected
