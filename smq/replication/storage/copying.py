"""Copies a stopped node's data directory, to another disk.

Owns the order that makes a copy whole or absent: it is written beside its place, read again and compared with what was
read of the original, and only then renamed. All rows are copied, except those that describe the directory itself. It
must never change what a row holds: a damaged value stays damaged, and its node repairs it. With one that cannot be read
there is no copy.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smq.replication.ports import Examined, Put, Table
from smq.replication.storage.directory import (
    DirectoryInUse,
    DiskOpenError,
    lock_directory,
    make_directory,
    sync_directory,
)
from smq.replication.storage.format_version import FORMAT_KEY
from smq.replication.storage.frames import KEY_BYTES_MAX
from smq.replication.storage.index import PLACE_KEY
from smq.replication.storage.offline import OfflineDisk, OfflineFailed

SLICE_BYTES: Final = 4 << 20  # of values, in memory at a time and in one transaction
_NAMED_MAX: Final = 10  # values, in a message
UNFINISHED: Final = ".copying"  # after the name, until the copy is whole
_OF_THE_DIRECTORY: Final = frozenset((FORMAT_KEY, PLACE_KEY))  # rows of table meta
_LAST: Final = b"\xff" * (KEY_BYTES_MAX + 1)
Row = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Copied:
    rows: int
    size: int  # of keys and values, bytes
    digest: str  # SHA-256 of all rows


class Summary:
    """Of all rows, in the order of tables and keys."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._rows = self._size = 0

    def add(self, table: Table, rows: list[Row]) -> None:
        for key, value in rows:
            head = f"{table.value} {len(key)} {len(value)} ".encode()
            self._hash.update(b"".join((head, key, value)))
            self._size += len(key) + len(value)
        self._rows += len(rows)

    def copied(self) -> Copied:
        return Copied(self._rows, self._size, self._hash.hexdigest())


def copy_directory(source: Path, to: Path, told: Callable[[str], None], mark: Put) -> Copied:
    """`told` gets what happens, as an operator reads it. The original gets `mark`, a row of table meta, before the copy
    gets its name; the copy never has it. Raises DiskOpenError, for either directory, or OfflineFailed. A copy that was
    interrupted begins again."""
    _refuse_used(to)
    unfinished = to.with_name(to.name + UNFINISHED)
    with ExitStack() as held:
        with OfflineDisk(source) as original:
            held.enter_context(_emptied(unfinished))
            _refuse_used(to)  # another copy may have ended since
            copied = _filled(unfinished, original, _OF_THE_DIRECTORY | {mark.key}, told)
            original.disk.submit([mark])
            original.settle()
        unfinished.rename(to)  # after the last commit to the original, which may fail
        sync_directory(to.parent)
    return copied


def _filled(unfinished: Path, original: OfflineDisk, left_out: Set[bytes], told: Callable[[str], None]) -> Copied:
    """The copy, written and read again."""
    read = Summary()
    unreadable: list[str] = []
    with OfflineDisk(unfinished) as copy:
        for table in Table:
            told(f"copying table {table.value}")
            for rows in _slices(original, table, left_out, unreadable):
                read.add(table, rows)
                copy.disk.submit([Put(table, key, value) for key, value in rows])
                copy.settle()
    if unreadable:
        raise OfflineFailed(
            f"{len(unreadable)} of the values in {original.directory} cannot be read: "
            f"{', '.join(unreadable[:_NAMED_MAX])}. Start its node on it while the others are up: it fetches batches "
            "from them. Copy it once `smq status` shows no damage, or start with an empty directory"
        )
    told("reading the copy")
    if summary_of(unfinished) != read.copied():
        raise OfflineFailed(
            f"{unfinished} does not hold what was written to it: its disk changes data. Copy to another disk"
        )
    return read.copied()


def summary_of(directory: Path) -> Copied:
    """Raises DiskOpenError or OfflineFailed."""
    summary = Summary()
    with OfflineDisk(directory) as opened:
        for table in Table:
            for rows in _slices(opened, table, _OF_THE_DIRECTORY, []):
                summary.add(table, rows)
    return summary.copied()


def _refuse_used(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DiskOpenError(f"{to} exists and is not empty: name a new directory for the copy")


@contextmanager
def _emptied(unfinished: Path) -> Iterator[None]:
    """The directory, empty, and no other copy's until the block ends: between two openings, too, and under its new
    name. Raises DirectoryInUse if another process is writing it."""
    make_directory(unfinished)
    with ExitStack() as held:
        directory = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, directory)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise DirectoryInUse(f"another copy is writing {unfinished}: wait for it, or name another directory") from e
        lock = lock_directory(unfinished)
        try:
            for path in unfinished.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(lock)
        yield


def _slices(opened: OfflineDisk, table: Table, left_out: Set[bytes], unreadable: list[str]) -> Iterator[list[Row]]:
    """Without the rows of table meta that are `left_out`. Read as the scrubber reads: a value that the medium cannot
    give is empty, and ends nothing. Adds its name to `unreadable`."""
    start: bytes | None = b""
    while start is not None:
        rows: list[Row] = []
        ends: list[Examined] = []

        def take(key: bytes, value: bytes, rows: list[Row] = rows) -> bool:
            if table is not Table.META or key not in left_out:
                rows.append((key, value))
            return True

        opened.disk.examine(table, start, _LAST, SLICE_BYTES, take, ends.append)
        opened.run_until(lambda ends=ends: bool(ends))  # type: ignore[misc]  # default binds ends
        unreadable.extend(f"table {table.value}, key {key.hex()}" for key in ends[0].unreadable)
        yield rows
        start = ends[0].next_key
