"""A process that writes as a node does, and prints what the disk has acknowledged. Recorded by `recorder`.

    python -m chaos_tests.crash.workload DIRECTORY SUBMISSIONS [OPTION=VALUE ...]

Owns the written data (all derived from its number) and the acknowledgements on standard output: `log start, log end,
last journal index`. Now and then it loses the disk as a crash does, and opens it again. The options break LMDB's
settings, and `bug=NAME` plants a bug, to prove that the images would reveal it.
"""

import queue
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

from crc32c import crc32c

from chaos_tests.crash.planted import IMAGE_BUGS
from chaos_tests.crash.stores import crash, open_store
from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.store import LogStore
from smq.replication.raft.journal import JournalWriter, RaftJournal
from smq.replication.storage import index

PID: Final = PartitionId(b"crash-images........")
SIZES: Final = (50, 300, 1_500, 5_000, 14_000)
RESTART_EVERY: Final = 13  # submissions
TRIM_EVERY: Final = 7  # submissions; what is dead is collected, and its files are used again


def batch(number: int) -> bytes:
    """The batch with this number: its size and its bytes."""
    rng = random.Random(number)
    payload = rng.randbytes(10) * (rng.choice(SIZES) // 10)  # so that a trace compresses well
    rest = struct.pack(">hiqqqhii", 0, 0, number, number, -1, -1, -1, 1) + payload
    return struct.pack(">qiibI", 0, len(rest) + 9, -1, 2, crc32c(rest)) + rest


def command(index: int) -> bytes:
    return b"\x00" + index.to_bytes(8, "big") * 10


def main(directory: str, submissions: int, options: dict[str, str]) -> None:
    if options:
        _break(options)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk = open_store(directory, call_soon_threadsafe=calls.put, on_fatal=_fail)
    log = LogStore(disk).create(PID, Offset(0))
    journal = RaftJournal()
    writer = JournalWriter(disk, journal, lambda: None)
    journal.set_term(1, None)
    for number in range(submissions):
        if number and number % RESTART_EVERY == 0:
            crash(disk)
            disk = open_store(directory, call_soon_threadsafe=calls.put, on_fatal=_fail)
            log = LogStore(disk).open_all()[PID]
            journal = RaftJournal()
            for _ in journal.load(disk):
                pass
            writer = JournalWriter(disk, journal, lambda: None)
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


def _break(options: dict[str, str]) -> None:
    """The index alone imports the library."""
    if (bug := options.pop("bug", None)) is not None:
        IMAGE_BUGS[bug].install()
    lmdb: Any = vars(index)["lmdb"]
    honest: Callable[..., Any] = lmdb.open
    broken = {name: value == "True" for name, value in options.items()}
    lmdb.open = lambda *args, **given: honest(*args, **{**given, **broken})


def _fail(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), dict(a.split("=", 1) for a in sys.argv[3:]))
