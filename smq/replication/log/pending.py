"""An append on its way to the disk.

Owns whether its log still waits for it: truncation makes it a no-op. Only the partition log makes one.
"""

from collections.abc import Callable

from smq.raft_state.ids import Offset


class Pending:
    """The disk calls it once the append is durable. It and its two callbacks are one object, so that an append is
    cheap."""

    __slots__ = ("_done", "_on_durable", "end")

    def __init__(self, on_durable: Callable[[Offset], None], end: Offset, done: Callable[[], None]) -> None:
        self._on_durable: Callable[[Offset], None] | None = on_durable
        self.end = end
        self._done = done

    def forget(self) -> None:
        self._on_durable = None

    def __call__(self) -> None:
        if self._on_durable is not None:
            self._on_durable(self.end)
            self._done()
