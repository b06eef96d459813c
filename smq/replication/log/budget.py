"""What all logs of a node hold in memory together.

Owns the counts only: each log adds and takes away its own. It must never decide what a log may keep. The log store
makes one, and its logs share it.
"""

from smq.replication.config import TAIL_BYTES_KEPT


class NodeBudget:
    """What all partitions of a node hold in memory together: bytes of batches, and how much each partition keeps of
    durable ones; and producers. Batches that are not durable are always held: the disk's queue bounds them."""

    __slots__ = ("kept", "producers", "used")

    def __init__(self, kept: int | None) -> None:
        self.kept = TAIL_BYTES_KEPT if kept is None else kept
        self.used = 0
        self.producers = 0
