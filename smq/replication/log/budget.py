"""What all logs of a node hold in memory together.

Owns the counts, and which log gives room when it is short: each log adds and takes away its own. It must never decide
what a log may keep while there is room. The log store makes one, and its logs share it.
"""

from typing import Final, Protocol

from smq.replication.config import TAIL_BYTES_KEPT

TAIL_BYTES_NODE_MAX: Final = 64 << 20  # over all partitions; above this, idle ones leave memory first


class TailHolder(Protocol):
    """A log, as the budget needs it."""

    def release_tail(self) -> None:
        """Durable batches leave memory."""


class NodeBudget:
    """What all partitions of a node hold in memory together: bytes of batches, and how much each partition keeps of
    durable ones; and producers. Batches that are not durable are always held: the disk's queue bounds them."""

    __slots__ = ("_holders", "kept", "newest", "producers", "used")

    def __init__(self, kept: int | None) -> None:
        self.kept = TAIL_BYTES_KEPT if kept is None else kept
        self.used = 0
        self.producers = 0
        self.newest: TailHolder | None = None  # has grown last
        self._holders: dict[TailHolder, None] = {}  # of durable batches; the log that has grown last comes last

    def note_growth(self, log: TailHolder) -> None:
        """The log has a newer durable batch. Beyond the bound, those go that have not grown for the longest time: a
        partition that rests must not keep the room from those at work."""
        holders = self._holders
        holders.pop(log, None)
        while self.used > TAIL_BYTES_NODE_MAX and holders:
            idle = next(iter(holders))
            del holders[idle]
            idle.release_tail()
        holders[log] = None
        self.newest = log

    def forget(self, log: TailHolder) -> None:
        """The log is gone."""
        self._holders.pop(log, None)
        self.newest = None
