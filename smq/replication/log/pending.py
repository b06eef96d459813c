"""Batches of one submission on their way to the disk.

Owns which of them their log still waits for: truncation takes the later ones away, or all. Only the partition log makes
one.
"""

from collections.abc import Callable

from smq.raft_state.ids import Offset


class Pending:
    """The disk calls it once the batches in [start, end) are durable. It and its two callbacks are one object, so that
    an append is cheap."""

    __slots__ = ("_done", "_on_durable", "end", "start")

    def __init__(
        self, on_durable: Callable[[Offset], None], start: Offset, end: Offset, done: Callable[[], None]
    ) -> None:
        self._on_durable: Callable[[Offset], None] | None = on_durable
        self.start = start
        self.end = end
        self._done = done

    def cut(self, end: Offset) -> bool:
        """Nothing from `end` on is waited for any more. False if nothing is left: then it does nothing."""
        self.end = min(self.end, end)
        if self.end > self.start:
            return True
        self._on_durable = None
        return False

    def __call__(self) -> None:
        if self._on_durable is not None:
            self._on_durable(self.end)
            self._done()
