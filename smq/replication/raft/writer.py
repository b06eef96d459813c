"""The journal's way to the disk: submits its changes, and reports to it which of them are durable.

Owns the submissions in flight. It must never split changes, nor report any that the disk has not reported.
The executor of turns imports it, and tools that write a journal without an engine.
"""

from collections import deque
from collections.abc import Callable

from smq.replication.ports import Disk
from smq.replication.raft.journal import Changes, RaftJournal


class JournalWriter:
    def __init__(self, disk: Disk, journal: RaftJournal, on_durable: Callable[[], None]) -> None:
        """`on_durable` is called on the loop after each submission of the journal that reached the disk."""
        self._disk = disk
        self._journal = journal
        self._on_durable = on_durable
        self._in_flight: deque[tuple[int, int]] = deque()  # (submission, writes); as bounded as the disk's queue

    def write(self, changes: Changes) -> int:
        """Returns the number of the submission."""
        seq = self._disk.submit(changes.ops, self._on_submission_done)
        self._in_flight.append((seq, changes.writes))
        return seq

    def flush(self) -> None:
        """Submits what has changed, if anything has."""
        if (changes := self._journal.take_changes()) is not None:
            self.write(changes)

    def flush_marks(self) -> None:
        if ops := self._journal.take_marks():
            self._disk.submit(ops)

    def _on_submission_done(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self._disk.durable_seq:
            self._journal.on_durable(self._in_flight.popleft()[1])
        self._on_durable()
