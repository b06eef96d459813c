"""Opens a data directory with the store that it is to have.

Owns the choice of the adapter, and imports only that one: a machine need not have what the other one needs. It must
never open two directories for one caller, or guess: `engine_of` says what a directory has.
"""

import os
from collections.abc import Callable

from smq.replication.storage.disk import StoreDisk
from smq.replication.storage.engine import Engine
from smq.replication.storage.rows import HomeOf


def open_disk(
    path: str | os.PathLike[str],
    engine: Engine,
    *,
    call_soon_threadsafe: Callable[[Callable[[], None]], object],
    on_fatal: Callable[[BaseException], None],
    call_soon: Callable[[Callable[[], None]], object] | None = None,
    home_of: HomeOf | None = None,
) -> StoreDisk:
    """`call_soon`: as for StoreDisk. `home_of`: None for a caller that deletes no batches. Raises DiskOpenError."""
    if engine is Engine.SQLITE:
        from smq.replication.storage.disk_sqlite import SqliteDisk

        return SqliteDisk(path, call_soon_threadsafe=call_soon_threadsafe, on_fatal=on_fatal, call_soon=call_soon)
    from smq.replication.storage.disk_lmdb import LmdbDisk

    return LmdbDisk(
        path, call_soon_threadsafe=call_soon_threadsafe, on_fatal=on_fatal, call_soon=call_soon, home_of=home_of
    )
