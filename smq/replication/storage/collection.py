"""The collection: what lives in files that are mostly dead is copied, sorted, to a new one, and they are used again.

Owns which files, and the order that loses nothing: the copies are durable before the index names them, and the index
does so durably before a file is retired. It works in steps, between which the index takes new rounds. A copy must match
its CRC: one that does not stays where it is, until it is repaired or deleted, and its file with it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from crc32c import crc32c

from smq.replication.ports import Op, Put, Table
from smq.replication.storage.frames import (
    PAGE_BYTES,
    Location,
    Rotten,
    encode_round,
    frame_bytes,
    head_bytes,
    located,
    parse_location,
    write_frame,
)
from smq.replication.storage.index import Index
from smq.replication.storage.node_log import LogFile, NodeLog
from smq.replication.storage.overlay import Pair

LIVE_SHARE_MAX: Final = 0.5  # of a file that is collected
LIVE_SHARE_MAX_SHORT: Final = 0.9  # if the disk is almost full
SHORT_FILES: Final = 4  # of the full size: less is free
SMALL_SHARE: Final = 0.25  # of the full size: sorted files below it are collected with others
ENTRIES_MAX: Final = 50_000  # in memory, and moved in one transaction
STEP_BYTES: Final = 4 << 20  # in one frame, and then synced
STEP_ENTRIES: Final = 1_000
PAUSE_S: Final = 10.0  # after an attempt that failed for lack of space


class Collection:
    """Of the thread that changes the index."""

    def __init__(self, index: Index, log: NodeLog, file_bytes: int) -> None:
        self._index = index
        self._log = log
        self._file_bytes = file_bytes
        self._running: Iterator[None] | None = None
        self._stuck: dict[int, int] = {}  # by file: its live bytes when they could not be copied
        self._paused_until = 0.0
        self.reusable_bytes = 0  # that come back without any deletion
        self.is_short = False  # the disk is almost full

    def sweep(self) -> None:
        """After a transaction of the index: retires the files that it left without a live byte."""
        index, log = self._index, self._log
        self.is_short = self._free_bytes() < SHORT_FILES * self._file_bytes
        log.live_bytes = sum(index.live.values())
        retired = log.retired
        dead = [file.number for file in self._closed() if not index.live.get(file.number)]
        if dead := [number for number in dead if number not in retired]:
            log.retire(dead)
        log.reclaim()
        sizes = {file.number: file.size for file in self._closed()}
        live = {number: index.live.get(number, 0) for number in sizes}
        chosen = {file.number for file in self._mostly_dead()}
        self.reusable_bytes = sum(
            sizes[number] - live[number] for number in sizes if number in chosen or not live[number]
        )

    def step(self) -> bool:
        """Does a part of the work. False if there is none."""
        if self._running is None:
            if time.monotonic() < self._paused_until or not (files := self._victims()):
                return False
            self._running = self._collect(files)
        try:
            next(self._running)
        except StopIteration:
            self._running = None
        except OSError:  # no space, most likely: what has been moved has been moved
            self._running = None
            self._paused_until = time.monotonic() + PAUSE_S
        return True

    # -------------------------------------------------------------------------------------------- which
    def _closed(self) -> list[LogFile]:
        """Those that no start replays and nothing is added to."""
        place = self._index.place
        assert place is not None
        return [file for file in list(self._log.files.values()) if file.is_sorted or file.number < place.file]

    def _mostly_dead(self) -> list[LogFile]:
        share = LIVE_SHARE_MAX_SHORT if self.is_short else LIVE_SHARE_MAX
        live = self._index.live
        found = [file for file in self._closed() if 0 < live.get(file.number, 0) <= share * file.size]
        return [file for file in found if not file.is_sorted or self._has_lost(file, share)]

    def _has_lost(self, file: LogFile, share: float) -> bool:
        """Of the batches that were in it. Its size has heads and padding, too, and its copy would have as many."""
        return self._index.live[file.number] <= share * self._log.batches_bytes(file)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._log.path)
        return found.f_bavail * found.f_frsize

    def _victims(self) -> list[LogFile]:
        live, small = self._index.live, SMALL_SHARE * self._file_bytes
        retired = self._log.retired

        def may_go(file: LogFile) -> bool:
            return file.number not in retired and self._stuck.get(file.number) != live.get(file.number)

        found = [file for file in self._mostly_dead() if may_go(file)]
        numbers = {file.number for file in found}
        if found:
            found += [
                file
                for file in self._closed()
                if file.is_sorted and file.size < small and file.number not in numbers and may_go(file)
            ]
        room = min(self._file_bytes, self._free_bytes() * 3 // 4)
        chosen: list[LogFile] = []
        for file in sorted(found, key=lambda file: live.get(file.number, 0) / file.size):
            if live.get(file.number, 0) <= room:
                room -= live.get(file.number, 0)
                chosen.append(file)
        return chosen if any(file.number in numbers for file in chosen) else []

    # -------------------------------------------------------------------------------------------- copying
    def _collect(self, files: list[LogFile]) -> Iterator[None]:
        entries: list[Pair] = []
        for file in files:
            found: list[Pair] = []
            with suppress(Rotten, OSError):  # then some stay where they are
                for op in self._log.batches_of(file):
                    if isinstance(op, Put) and op.table is Table.BATCHES:
                        found.append((op.key, op.value))
                    if len(found) >= STEP_ENTRIES:
                        entries += self._living(found)
                        found = []
                        yield
                    if len(entries) >= ENTRIES_MAX:
                        yield from self._copy(entries)
                        entries = []
            entries += self._living(found)
        yield from self._copy(entries)
        for file in files:
            if left := self._index.live.get(file.number, 0):
                self._stuck[file.number] = left

    def _living(self, rows: list[Pair]) -> list[Pair]:
        return [row for row, is_there in zip(rows, self._index.has_rows(rows), strict=True) if is_there]

    def _copy(self, rows: list[Pair]) -> Iterator[None]:
        """To one new file."""
        rows.sort()
        parts = _parted(rows)
        if not parts:
            return
        values_bytes = [sum(location.length for _, _, location in part) for part in parts]
        heads = [sum(len(key) + 11 for key, _, _ in part) for part in parts]
        size = PAGE_BYTES + sum(frame_bytes(*sizes) for sizes in zip(heads, values_bytes, strict=True))
        file, generation, fd = self._log.make_sorted(size)
        is_published = False
        try:
            moved: list[tuple[bytes, bytes, bytes]] = []
            at = PAGE_BYTES
            for number, part in enumerate(parts):
                ops, old = self._read(part)
                made = encode_round(ops)
                after = write_frame(fd, at, generation, number, made)
                os.fdatasync(fd)
                values_at = at + head_bytes(len(made.rows))
                for row, change in zip(old, located(ops, made, file.number, values_at), strict=True):
                    assert isinstance(change, Put)
                    moved.append((change.key, row, change.value))
                at = after
                yield
            self._log.publish(file)
            is_published = True
        finally:
            os.close(fd)
            if not is_published:
                with suppress(OSError):
                    file.path.unlink()
        self._index.move(moved)
        self.sweep()
        yield

    def _read(self, part: list[tuple[bytes, bytes, Location]]) -> tuple[list[Op], list[bytes]]:
        """Those that are what was written, and their rows."""
        pin = self._log.pins.enter()
        try:
            values = self._log.read([location for _, _, location in part])
        finally:
            self._log.pins.leave(pin)
        ops: list[Op] = []
        old: list[bytes] = []
        for (key, row, location), value in zip(part, values, strict=True):
            if len(value) == location.length and crc32c(value) == location.crc:
                ops.append(Put(Table.BATCHES, key, value))
                old.append(row)
        return ops, old


def _parted(rows: list[Pair]) -> list[list[tuple[bytes, bytes, Location]]]:
    """One frame each."""
    parts: list[list[tuple[bytes, bytes, Location]]] = []
    size = 0
    for key, row in rows:
        location = parse_location(key, row)
        assert location is not None, "the log's own"
        if not parts or size + location.length > STEP_BYTES or len(parts[-1]) >= STEP_ENTRIES:
            parts.append([])
            size = 0
        parts[-1].append((key, row, location))
        size += location.length
    return parts
