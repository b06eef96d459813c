"""A process that writes as a node does, and prints what the disk has acknowledged. Recorded by `recorder`.

    python -m chaos_tests.crash.workload DIRECTORY ENGINE SUBMISSIONS [OPTION=VALUE ...]

Owns the written data (all derived from its number) and the acknowledgements on standard output: `log start, log end,
last journal index`. The options break the store's settings (LMDB's arguments, SQLite's pragmas), to
prove that the images would reveal it.
"""

import queue
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from chaos_tests.crash.stores import open_store
from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.store import LogStore
from smq.replication.raft.journal import JournalWriter, RaftJournal
from smq.replication.storage import database_sqlite, disk_lmdb, disk_sqlite
from smq.replication.storage.engine import Engine

PID: Final = PartitionId(b"crash-images........")
SIZES: Final = (50, 300, 1_500, 5_000, 14_000)  # inline in a leaf, and on overflow pages
WRITE_AHEAD_BYTES: Final = 64 << 10  # small, so that it is full again and again
TRIM_EVERY: Final = 7  # submissions; a wrong order of writes would corrupt freed pages


def batch(number: int) -> bytes:
    """The batch with this number: its size and its bytes."""
    rng = random.Random(number)
    payload = rng.randbytes(10) * (rng.choice(SIZES) // 10)  # so that a trace compresses well
    rest = struct.pack(">hiqqqhii", 0, 0, number, number, -1, -1, -1, 1) + payload
    return struct.pack(">qiibI", 0, len(rest) + 9, -1, 2, crc32c(rest)) + rest


def command(index: int) -> bytes:
    return b"\x00" + index.to_bytes(8, "big") * 10


def main(directory: str, engine: Engine, submissions: int, options: dict[str, str]) -> None:
    if options:
        _break(engine, options)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk = open_store(
        directory, engine, call_soon_threadsafe=calls.put, on_fatal=_fail, write_ahead_bytes=WRITE_AHEAD_BYTES
    )
    log = LogStore(disk).create(PID, Offset(0))
    journal = RaftJournal()
    writer = JournalWriter(disk, journal, lambda: None)
    journal.set_term(1, None)
    for number in range(submissions):
        data = batch(number)
        log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(number + 1), done=lambda: None)
        journal.add(command(number + 1), number + 1, 1)
        writer.flush()
        if number % TRIM_EVERY == TRIM_EVERY - 1:
            log.advance_log_start(Offset(max(number - 2 * TRIM_EVERY, 0)))
        while disk.durable_seq < disk.submitted_seq:
            calls.get()()
        sys.stdout.write(f"acked {log.log_start} {log.durable_end} {journal.durable_index}\n")
        sys.stdout.flush()


def _break(engine: Engine, options: dict[str, str]) -> None:
    """The adapters alone import the libraries."""
    if engine is Engine.LMDB:
        lmdb: Any = vars(disk_lmdb)["lmdb"]
        honest: Callable[..., Any] = lmdb.open
        broken = {name: value == "True" for name, value in options.items()}
        lmdb.open = lambda *args, **given: honest(*args, **{**given, **broken})
        return
    opened = database_sqlite.open_database

    def open_broken(path: Path, **given: int) -> Any:
        writer, readers = opened(path, **given)
        for name, value in options.items():
            writer.execute(f"PRAGMA {name} = {value}")
        return writer, readers

    vars(disk_sqlite)["open_database"] = open_broken


def _fail(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    main(sys.argv[1], Engine(sys.argv[2]), int(sys.argv[3]), dict(a.split("=") for a in sys.argv[4:]))
