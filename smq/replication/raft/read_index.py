"""Read indexes: a log position that covers everything committed when a read began, without an entry of its own.

Owns the reads that wait within one leadership (Ongaro's thesis, 6.4). A read is confirmed when a majority has answered
a question that was sent after the read began. Then no node led a newer term when it began, so the index taken at that
moment covers everything committed by then. It must never confirm by a clock, nor by an answer to an older question.
Only the leader's role imports it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

READS_MAX: Final = 10_000  # each node has a few in flight; the rest belong to callers that have given up


@dataclass(frozen=True, slots=True)
class _Read:
    number: int  # of the last question before it
    index: int
    done: Callable[[int | None], None]


class Reads:
    """`done` gets the index, or None if this node no longer leads."""

    def __init__(self) -> None:
        self._waiting: deque[_Read] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def last_number(self) -> int:
        """The number of the last question before the youngest read; -1 if no read waits."""
        return self._waiting[-1].number if self._waiting else -1

    def begin(self, number: int, index: int, done: Callable[[int | None], None]) -> None:
        if len(self._waiting) >= READS_MAX:
            done(None)
        else:
            self._waiting.append(_Read(number, index, done))

    def confirm(self, answered: float) -> None:
        """A majority has answered the question with this number, or a later one."""
        while self._waiting and self._waiting[0].number < answered:
            read = self._waiting.popleft()
            read.done(read.index)

    def give_up(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for read in waiting:
            read.done(None)
