"""A node's disk without a node: for tools that read or change a directory while its node is stopped.

Owns the loop that such a disk reports to, which is run here until something has happened. It must never serve a node.
"""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self

from smq.replication.storage.disk import NodeLogDisk

_STEP_S: Final = 3600  # without a report from the disk


class OfflineFailed(Exception):
    """The disk could not be read or written."""


class OfflineDisk:
    """Open within its block. Raises DiskOpenError from the constructor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._failures: list[BaseException] = []
        self._calls: SimpleQueue[Any] = SimpleQueue()  # what the disk wants to be run
        self.disk = NodeLogDisk(directory, call_soon_threadsafe=self._calls.put, on_fatal=self._failures.append)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Raises OfflineFailed."""
        while not is_done():
            self._calls.get(timeout=_STEP_S)()
            self._refuse_failed()

    def settle(self) -> None:
        """Until everything submitted is durable."""
        self.run_until(lambda: self.disk.durable_seq == self.disk.submitted_seq)

    def _refuse_failed(self) -> None:
        if self._failures:
            raise OfflineFailed(f"{self.directory} cannot be used: {self._failures[0]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commits what is queued. Raises OfflineFailed if that fails, unless another error ends the block."""
        self.disk.close()
        while not self._calls.empty():
            self._calls.get()()
        if error is None:
            self._refuse_failed()
