"""What the committed batches say of producers: their sequences, and their transactions.

Owns the demands on them. Each batch of an idempotent producer is committed once, and in its order. A batch of a
transaction comes before the one control batch that ends it as it was decided, and no node takes more for stable than
that. It must never look at a node: `truth` gives it what is committed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from smq.raft_state.ids import Offset, ProducerId
from smq.records import BatchHeader, is_commit_marker, parse_header
from smq.replication.log.stored_batch import StoredValue


class Violation(AssertionError):
    """A promise is broken."""


@dataclass(eq=False, slots=True)
class Transaction:
    producer_id: ProducerId
    is_committed: bool | None = None  # None until it is decided
    is_completed: bool = False  # Raft says that the log says so
    bases: list[Offset] = field(default_factory=list)  # of its committed batches
    marker: Offset | None = None

    def ends_below(self, end: Offset) -> bool:
        return self.marker is not None and self.marker < end


class ProducerTruth:
    def __init__(self) -> None:
        self._next: dict[int, tuple[int, int]] = {}  # epoch and sequence, by producer
        self._ends: dict[int, Offset] = {}  # of each one's last batch
        self.forgotten: set[int] = set()  # they had expired once, so that a repetition may be refused
        self._open: dict[int, Transaction] = {}
        self.transactions: list[Transaction] = []

    def on_committed(self, stored: StoredValue, transaction: Transaction | None) -> None:
        """The next batch, of a transaction or of none."""
        header = parse_header(stored.batch)
        if header.is_control:
            self._end(stored, header)
            return
        if header.producer_id >= 0:
            self._count(stored, header)
            self._ends[header.producer_id] = stored.end
        open_one = self._open.get(header.producer_id)
        if open_one not in (None, transaction):
            raise Violation(f"offset {stored.base}: the transaction before has no marker yet")
        if transaction is None:
            return
        if transaction.marker is not None or transaction.is_completed:
            raise Violation(f"offset {stored.base}: its transaction has ended, at {transaction.marker}")
        self._open[header.producer_id] = transaction
        transaction.bases.append(stored.base)

    def _count(self, stored: StoredValue, header: BatchHeader) -> None:
        if header.producer_id not in self._next and header.producer_id in self.forgotten:  # any sequence begins
            self._next[header.producer_id] = header.producer_epoch, header.base_sequence
        epoch, due = self._next.get(header.producer_id, (header.producer_epoch, 0))
        if header.producer_epoch > epoch:
            due = 0
        if header.producer_epoch < epoch or header.base_sequence != due:
            raise Violation(
                f"offset {stored.base}: epoch {header.producer_epoch}, sequence {header.base_sequence} of producer"
                f" {header.producer_id} is committed, where {due} of epoch {epoch} is due"
            )
        self._next[header.producer_id] = header.producer_epoch, header.last_sequence + 1

    def _end(self, stored: StoredValue, header: BatchHeader) -> None:
        ended = self._open.pop(header.producer_id, None)
        if ended is None:
            raise Violation(f"offset {stored.base}: a marker of producer {header.producer_id}, which has nothing open")
        is_commit = is_commit_marker(stored.batch)
        if is_commit != ended.is_committed:
            raise Violation(f"offset {stored.base}: the marker says commit={is_commit}, not {ended.is_committed}")
        ended.marker, self._ends[header.producer_id] = stored.base, stored.end
        epoch, _ = self._next[header.producer_id]
        if header.producer_epoch > epoch:
            self._next[header.producer_id] = header.producer_epoch, 0

    def complete(self, transaction: Transaction) -> None:
        """Raft says that the log has its marker, if it has anything of it."""
        transaction.is_completed = True
        if transaction in self._open.values():
            raise Violation(f"the transaction from {transaction.bases[0]} on counts as complete without a marker")

    def forget(self, start: Offset) -> None:
        """Batches that end at or below it are not known as repetitions any more, and the place of their producers is
        forgotten, unless they have a transaction open."""
        for producer_id, end in list(self._ends.items()):
            if end <= start:
                self.forgotten.add(producer_id)
                if producer_id not in self._open:
                    del self._ends[producer_id], self._next[producer_id]

    def stable_end(self, known: Offset, log_end: Offset) -> Offset:
        """The last stable offset for a node that knows this commit point. Its state may be older than its log: a
        transaction that is complete counts if this log has its marker."""
        open_from = (t.bases[0] for t in self._with_batches() if not t.ends_below(log_end if t.is_completed else known))
        return min((known, *open_from))

    def _with_batches(self) -> Iterator[Transaction]:
        return (transaction for transaction in self.transactions if transaction.bases)

    def judge_aborted(self, covers: Callable[[ProducerId, Offset], bool], log_start: Offset) -> None:
        """What a log says is aborted."""
        for transaction in self._with_batches():
            for base in transaction.bases:
                if base >= log_start and covers(transaction.producer_id, base) == transaction.is_committed:
                    raise Violation(
                        f"offset {base}: its transaction counts as committed={not transaction.is_committed}"
                    )
