"""A third store behind the Disk port, as small as one can be: a file of frames, one for each transaction.

It shows what a store has to do (docs/extending.md), and the conformance suite judges it as it judges the others. It is
no store for a node: it holds every row in memory, its file only grows, and a frame that rots looks like a torn one if
nothing can be read after it.
"""

import enum
import os
import struct
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from crc32c import crc32c

from smq.replication.ports import Delete, Op, Put, Rows, T, Table
from smq.replication.storage.directory import FILE_MODE, REPLACE_ADVICE, DiskOpenError, sync_directory
from smq.replication.storage.disk import KEY_BYTES_MAX, StoreDisk
from smq.replication.storage.format_version import FORMAT_KEY, check_format, first_rows
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import Row, WalkedRows, beginning_at, merged
from smq.replication.storage.write_ahead import WRITE_AHEAD_KEY, Active

_FRAME: Final = struct.Struct(">II")  # size of the body, its CRC-32C
_OP: Final = struct.Struct(">BBHI")  # is it a Put, the table, the sizes of the key and of the value (or of `stop`)
_TABLES: Final = list(Table)  # their order is part of the format


class Name(enum.StrEnum):
    """What `Engine` is to the stores of smq."""

    FRAMES = "frames"

    @property
    def data_file(self) -> str:
        return "data.frames"


class FrameStore(StoreDisk):
    """See StoreDisk, which has the write-ahead file, the queue, the threads and the lock of the directory."""

    engine = Name.FRAMES
    errors = (OSError, ValueError)

    def _open_store(self, undo: ExitStack, write_ahead_bytes: int) -> int:
        self._rows_lock = threading.RLock()  # held by the writer while a transaction takes effect, and by each read
        self._keys: dict[Table, list[bytes]] = {table: [] for table in Table}  # sorted
        self._values: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._number = self._end = 0
        file = self._path / self.engine.data_file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        undo.callback(os.close, self._fd)
        self._replay(file.read_bytes())
        if self._number:
            check_format(self._path, self._values[Table.META][FORMAT_KEY])
        else:
            self._append([Put(Table.META, key, value) for key, value in first_rows(write_ahead_bytes).items()])
            sync_directory(self._path)
        return self._number

    def _replay(self, data: bytes) -> None:
        """A last frame that is not whole was torn by a crash, and no answer that depends on it was given."""
        while self._end + _FRAME.size <= len(data):
            size, crc = _FRAME.unpack_from(data, self._end)
            stop = self._end + _FRAME.size + size
            body = data[self._end + _FRAME.size : stop]
            if len(body) == size and crc32c(body) == crc:
                self._apply(_decoded(body))
                self._end = stop
            elif stop < len(data):
                raise DiskOpenError(f"{self._path / self.engine.data_file} is damaged at {self._end}. {REPLACE_ADVICE}")
            else:
                break
        os.ftruncate(self._fd, self._end)

    def _close_store(self) -> None:
        os.close(self._fd)

    # ------------------------------------------------------------------------------------------ writes
    def _write(self, ops: Sequence[Op], active: Active) -> int:
        self._append([*ops, Put(Table.META, WRITE_AHEAD_KEY, active.encode())])
        return self._number

    def _append(self, ops: Sequence[Op]) -> None:
        body = b"".join(map(_encoded, ops))
        frame = _FRAME.pack(len(body), crc32c(body)) + body
        if os.pwrite(self._fd, frame, self._end) < len(frame):
            raise OSError(f"{self.engine.data_file} could not take {len(frame)} bytes: is the disk full?")
        os.fdatasync(self._fd)  # persist, then speak: only now does a read see it
        self._end += len(frame)
        self._apply(ops)

    def _apply(self, ops: Sequence[Op]) -> None:
        with self._rows_lock:
            for op in ops:
                keys, values = self._keys[op.table], self._values[op.table]
                if isinstance(op, Put):
                    if op.key not in values:
                        insort(keys, op.key)
                    values[op.key] = op.value
                else:
                    gone = slice(
                        bisect_left(keys, op.start), max(bisect_left(keys, op.stop), bisect_left(keys, op.start))
                    )
                    for key in keys[gone]:
                        del values[key]
                    del keys[gone]
            self._number += 1

    # ------------------------------------------------------------------------------------------- reads
    @contextmanager
    def _walk(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool = False,
        limit: int = 1 << 30,
        is_loop: bool = True,
        lowest: bytes | None = None,
        bytes_wanted: int = 1 << 62,
    ) -> Iterator[Iterator[Row]]:
        yield self._walked(self._pending, table, start, stop, reverse=reverse, limit=limit, lowest=lowest)

    def _walked(
        self,
        pending: PendingRows,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool,
        limit: int,
        lowest: bytes | None = None,
    ) -> Iterator[Row]:
        """The pending rows are taken first: a store that is newer than they are has them all."""
        base, over = pending.between(table, start, stop, lowest=lowest, reverse=reverse, limit=limit)
        with self._rows_lock:
            keys, values, number = self._keys[table], self._values[table], self._number
            first = bisect_left(keys, start)
            if lowest is not None:
                first = max(bisect_right(keys, start) - 1, bisect_left(keys, lowest))
            pairs = [(key, values[key]) for key in keys[first : max(first, bisect_left(keys, stop))]]
        rows: Iterator[Row] = (
            (key, len(value), partial(bytes, value)) for key, value in pairs[:: -1 if reverse else 1]
        )
        found = merged(rows, over if number == base else [], reverse=reverse)
        return found if lowest is None else beginning_at(found, start)

    def _find(self, find: Callable[[Rows], T]) -> T:
        pending = self._pending.copy()
        with self._rows_lock:  # nothing takes effect meanwhile: all tables are of one moment
            return find(_Moment(partial(self._walked, pending)))

    # ------------------------------------------------------------------------------------------- space
    def _reusable_bytes(self) -> int:
        return 0

    def _store_files(self) -> tuple[str, ...]:
        return (self.engine.data_file,)

    # ------------------------------------------------------------------- what this store has no use for
    def _prepare_recovery(self) -> None: ...

    def _settle_start(self) -> None: ...

    def _tidy(self) -> None: ...


class _Moment(WalkedRows):
    def __init__(self, walked: Callable[..., Iterator[Row]]) -> None:
        self._walked = walked

    @contextmanager
    def _walk(self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int) -> Iterator[Iterator[Row]]:
        yield self._walked(table, start, stop, reverse=reverse, limit=limit)


def _encoded(op: Op) -> bytes:
    first, second = (op.key, op.value) if isinstance(op, Put) else (op.start, op.stop)
    if isinstance(op, Put) and not 0 < len(first) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(first)}")
    return _OP.pack(isinstance(op, Put), _TABLES.index(op.table), len(first), len(second)) + first + second


def _decoded(body: bytes) -> list[Op]:
    ops: list[Op] = []
    at = 0
    while at < len(body):
        is_put, table, first_bytes, second_bytes = _OP.unpack_from(body, at)
        middle = at + _OP.size + first_bytes
        first, second = body[at + _OP.size : middle], body[middle : middle + second_bytes]
        ops.append(Put(_TABLES[table], first, second) if is_put else Delete(_TABLES[table], first, second))
        at = middle + second_bytes
    return ops
