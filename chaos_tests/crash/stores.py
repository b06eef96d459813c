"""Opens a node's directory with either store, as the crash tests need it.

Owns which files a power loss may tear. It uses the production store throughout.
"""

import os
from collections.abc import Callable
from typing import Final

from smq.replication.log.stored_batch import home_of
from smq.replication.storage.database_sqlite import JOURNAL_FILE
from smq.replication.storage.disk import StoreDisk
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.disk_sqlite import SqliteDisk
from smq.replication.storage.engine import Engine
from smq.replication.storage.write_ahead import WRITE_AHEAD_BYTES, WRITE_AHEAD_FILE

FILES: Final = {
    Engine.LMDB: (Engine.LMDB.data_file, WRITE_AHEAD_FILE),
    Engine.SQLITE: (Engine.SQLITE.data_file, JOURNAL_FILE, WRITE_AHEAD_FILE),
}
_MAP_BYTES: Final = 1 << 30
_CHECKPOINT_BYTES: Final = 256 << 10  # small, so that SQLite's journal begins again and again


def open_store(
    directory: str | os.PathLike[str],
    engine: Engine,
    *,
    call_soon_threadsafe: Callable[[Callable[[], None]], object],
    on_fatal: Callable[[BaseException], None],
    write_ahead_bytes: int = WRITE_AHEAD_BYTES,
) -> StoreDisk:
    if engine is Engine.SQLITE:
        return SqliteDisk(
            directory,
            call_soon_threadsafe=call_soon_threadsafe,
            on_fatal=on_fatal,
            checkpoint_bytes=_CHECKPOINT_BYTES,
            write_ahead_bytes=write_ahead_bytes,
        )
    return LmdbDisk(
        directory,
        call_soon_threadsafe=call_soon_threadsafe,
        on_fatal=on_fatal,
        home_of=home_of,
        map_size=_MAP_BYTES,
        write_ahead_bytes=write_ahead_bytes,
    )
