"""Flips bits in a node's real files: writes a simulated node's disk as such, damages one, and reads as a node would.

    python -m chaos_tests.crash.flips DIRECTORY     (the reading: rows on standard output)

Owns the conversion in both directions, and the names of the outcomes. The reading is a process of its own: LMDB has no
checksums, so a damaged tree may end the process that walks it by a signal.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, cast

from chaos_tests.crash.stores import crash
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import StartRefused, claim_identity
from smq.replication.ports import DataDamaged, Disk, Put, Table
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.format_version import FORMAT_KEY
from smq.replication.storage.frames import KEY_BYTES_MAX
from smq.replication.storage.index import DATA_FILE, PLACE_KEY
from smq.replication.storage.node_log import LOG_DIRECTORY
from smq.testing.virtual.disk import DiskImage

PAGE_BYTES: Final = 4096
INDEX_SHARE: Final = 0.5  # of the damages
LATE_SHARE: Final = 0.1  # of the rows of each table, the last ones
LATE_ROWS_MAX: Final = 100  # of each table
LATE_ROWS: Final = 10  # per round
FILE_BYTES: Final = 1 << 20
REFUSED: Final = 3  # exit code: the directory is refused with a message, as by a node
WALK_S: Final = 30


def flipped(image: DiskImage, rng: Random) -> tuple[DiskImage | None, str]:
    """(the image after bit flips in its file or a truncation, or None if a node would not run on it; the outcome)."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "node"
        is_index = rng.random() < INDEX_SHARE
        _write(image, directory, late_share=LATE_SHARE if not is_index else 0)
        file = directory / DATA_FILE
        if not is_index:
            file = rng.choice(sorted((directory / LOG_DIRECTORY).iterdir()))
        kind = f"{DATA_FILE if is_index else LOG_DIRECTORY}, {_damage(file, rng)}"
        reading = [sys.executable, "-m", "chaos_tests.crash.flips", str(directory)]
        try:
            ended = subprocess.run(reading, check=False, capture_output=True, timeout=WALK_S)
        except subprocess.TimeoutExpired:
            return None, f"{kind}: never ends"
    if ended.returncode == REFUSED:
        return None, f"{kind}: refused with a message"
    if ended.returncode != 0:
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else ended.stderr.decode().splitlines()[-1][:60]
        return None, f"{kind}: ended by {how}"
    found = DiskImage(is_damaged=True)
    for name, rows in json.loads(ended.stdout).items():
        found.tables[Table(name)].update((bytes.fromhex(key), bytes.fromhex(value)) for key, value in rows)
    for own in (FORMAT_KEY, PLACE_KEY):
        found.tables[Table.META].pop(own, None)
    return found, f"{kind}: {_difference(image, found)}"


class _Rows:
    """The rows of an image, of which a starting node reads its identity; what it writes is not kept."""

    def __init__(self, image: DiskImage) -> None:
        self._image = image

    def get(self, table: Table, key: bytes) -> bytes | None:
        found: bytes | None = self._image.tables[table].get(key)
        return found

    def submit(self, _ops: object, _done: object) -> None: ...


def is_refused_as_foreign(image: DiskImage, config: NodeConfig) -> bool:
    """Whether this node would take the directory for another node's or cluster's, or its identity for damaged: the
    names in it have no CRC."""
    try:
        claim_identity(cast(Disk, _Rows(image)), config, Random(0), 0, lambda: None)
    except (StartRefused, DataDamaged):
        return True
    return False


def _write(image: DiskImage, directory: Path, *, late_share: float) -> None:
    """As a node that was stopped in order leaves it; or, with some of the rows in the log alone, as one that was
    killed. Rows of earlier damage whose keys the index reads but does not take are left out."""
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk = NodeLogDisk(directory, call_soon_threadsafe=calls.put, on_fatal=_fail, file_bytes=FILE_BYTES)
    late: list[Put] = []
    for table, rows in image.tables.items():
        puts = [Put(table, key, value) for key, value in rows.items() if 0 < len(key) <= KEY_BYTES_MAX]
        first = len(puts) - int(len(puts) * late_share)
        disk.submit(puts[:first])
        late += puts[first:][-LATE_ROWS_MAX:]
        disk.submit(puts[first:][:-LATE_ROWS_MAX])
    if late:
        disk.close()
        while not calls.empty():
            calls.get()()
        disk = NodeLogDisk(directory, call_soon_threadsafe=calls.put, on_fatal=_fail, file_bytes=FILE_BYTES)
    for at in range(0, len(late), LATE_ROWS):
        disk.submit(late[at : at + LATE_ROWS])
        while disk.durable_seq < disk.submitted_seq:
            calls.get()()
    if late:
        crash(disk)
    else:
        disk.close()


def _fail(error: BaseException) -> None:
    raise error


def _damage(file: Path, rng: Random) -> str:
    used = len(file.read_bytes().rstrip(b"\x00"))
    size = max(used, PAGE_BYTES)  # most of a write-ahead file has never been used
    if rng.random() < 0.03:
        os.truncate(file, rng.randrange(0, size))
        return "cut"
    where = rng.choice(("anywhere", "anywhere", "meta pages", "page headers"))
    count = rng.choice((1, 1, 1, 3, 64))
    with file.open("r+b") as f:
        for _ in range(count):
            at = rng.randrange(size)
            if where == "meta pages":
                at = rng.randrange(2) * PAGE_BYTES + rng.randrange(160)
            elif where == "page headers":
                at = at // PAGE_BYTES * PAGE_BYTES + rng.randrange(64)
            f.seek(at)
            old = f.read(1)[0]
            f.seek(at)
            f.write(bytes([old ^ (1 << rng.randrange(8))]))
    return where


def _difference(before: DiskImage, after: DiskImage) -> str:
    for table, rows in before.tables.items():
        if list(rows) != list(after.tables[table]):
            return "rows missing or under other keys"
    if any(before.tables[table] != after.tables[table] for table in Table):
        return "values changed"
    return "no difference"


def _read(directory: str) -> int:
    try:
        disk = NodeLogDisk(directory, call_soon_threadsafe=lambda fn: None, on_fatal=_fail, file_bytes=FILE_BYTES)
        rows = {table: disk.scan(table, b"", b"\xff" * 512) for table in Table}
    except (DiskOpenError, DataDamaged) as e:
        sys.stderr.write(f"{e}\n")
        return REFUSED
    json.dump({table.value: [(key.hex(), value.hex()) for key, value in rows[table]] for table in Table}, sys.stdout)
    return 0


if __name__ == "__main__":
    code = _read(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
