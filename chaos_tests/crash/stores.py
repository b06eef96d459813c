"""Opens a node's directory as the crash tests need it: with small files, and an index that is brought up to the log
every few rounds.

It uses the production store throughout.
"""

import os
from collections.abc import Callable
from typing import Final

from smq.replication.storage import overlay
from smq.replication.storage.disk import NodeLogDisk

FILE_BYTES: Final = 64 << 10  # the log goes from one to the next again and again
INDEXED_ROWS: Final = 40  # pending before the index takes them


def open_store(
    directory: str | os.PathLike[str],
    *,
    call_soon_threadsafe: Callable[[Callable[[], None]], object],
    on_fatal: Callable[[BaseException], None],
) -> NodeLogDisk:
    vars(overlay).update(ROWS_MAX=INDEXED_ROWS)
    return NodeLogDisk(directory, call_soon_threadsafe=call_soon_threadsafe, on_fatal=on_fatal, file_bytes=FILE_BYTES)


def crash(disk: NodeLogDisk) -> None:
    """As kill -9 between two system calls: the threads end, and the index does not get what it does not have."""
    disk._is_failed = True
    disk.close()
