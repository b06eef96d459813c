"""The files of the node's log: appended to, replayed by a start, read by place, and used again.

Owns the names, heads and sizes of the files, which of them the log goes on in, and when one may be used again. It must
never decide what lives: the index counts that, and the collection asks it. One thread appends; any thread reads.

    log/0000000001.log      rounds; each file ends with a frame that names the next one
    log/0000000007.sorted   batches that the collection has kept, of files that are gone
    log/0000000003.spare    of no use now, written over when a file is needed
    log/0000000009.new      not whole yet: a start removes it

A file begins with a page that holds: crc u32, "smq-log", format version u32, number u64, generation (8), size u64. It
has its whole size from the beginning, so a round needs no space and no new metadata. A number is a file's for ever:
what it names is either the bytes that were written under it or gone.
"""

import errno
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from smq.replication.ports import Op
from smq.replication.storage.directory import (
    DIRECTORY_MODE,
    FILE_MODE,
    REPLACE_ADVICE,
    DiskOpenError,
    sync_directory,
)
from smq.replication.storage.format_version import FORMAT_VERSION
from smq.replication.storage.frames import (
    GENERATION_BYTES,
    PAGE_BYTES,
    Frame,
    Location,
    Rotten,
    Round,
    first_number,
    frame_bytes,
    frames,
    head_bytes,
    is_begun,
    next_file_round,
    values_bytes,
    write_frame,
)

LOG_DIRECTORY: Final = "log"
FILE_BYTES: Final = 256 << 20
FIRST_FILE_BYTES: Final = 16 << 20  # of a new node; a file is as large as what lives, up to the full size
FILE_BYTES_MIN: Final = 1 << 20  # when the disk is almost full
DISK_FILES_MIN: Final = 64  # of the file system's size
OPEN_MAX: Final = 128  # files, for reading
RUN_BYTES_MAX: Final = 1 << 20  # of neighbours that are read as one, and then parted
ROUNDS, SORTED, SPARE, NEW = ".log", ".sorted", ".spare", ".new"
SMALL_BYTES: Final = 16 << 10  # of a round: for larger ones the journal's part is small
ZEROS_BYTES: Final = 256 << 10  # written ahead of small rounds
_MAGIC: Final = b"smq-log"
_WAITS: Final = os.O_DSYNC  # each write returns once it is durable
_HEADER: Final = struct.Struct(f">7sIQ{GENERATION_BYTES}sQ")
_CRC_BYTES: Final = 4


class LogDamaged(DiskOpenError):
    """The log has lost or changed a round that may have been acknowledged."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}. {REPLACE_ADVICE}")


class Place(NamedTuple):
    """In the log: where the round of that number is, or will be."""

    file: int
    at: int
    number: int
    generation: bytes  # of the file


class LogFile:
    """One file, by its number."""

    def __init__(self, path: Path, number: int, size: int) -> None:
        self.path, self.number, self.size = path, number, size
        self.is_written = False  # to its end: it was a spare one
        self.handle: _Handle | None = None
        self.batches_bytes = 0  # of a sorted one, once it has been asked for

    @property
    def is_sorted(self) -> bool:
        return self.path.suffix == SORTED

    def head(self) -> tuple[int, bytes] | None:
        """Size and generation as the file's own first page has them; None if that is damaged or another file's."""
        with self.path.open("rb") as file:
            page = file.read(PAGE_BYTES)
        body = page[_CRC_BYTES : _CRC_BYTES + _HEADER.size]
        if len(body) < _HEADER.size or crc32c(body).to_bytes(_CRC_BYTES, "big") != page[:_CRC_BYTES]:
            return None
        magic, version, number, generation, size = _HEADER.unpack(body)
        if magic != _MAGIC or version != FORMAT_VERSION or number != self.number:
            return None
        return size, generation


class _Handle:
    """Closed when the last reader has let it go."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.fd = _opened(path, flags)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self.fd)


def _opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


class Pins:
    """One per read that is under way, with the time at which it began. A file that nothing names any more is used again
    once the reads that began before have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._active: dict[int, int] = {}

    def enter(self) -> int:
        with self._lock:
            self._active[self._now] = self._active.get(self._now, 0) + 1
            return self._now

    def leave(self, pin: int) -> None:
        with self._lock:
            self._active[pin] -= 1
            if not self._active[pin]:
                del self._active[pin]

    def advance(self) -> int:
        """A read that enters from now on sees what has been committed. Returns the time that is over."""
        with self._lock:
            self._now += 1
            return self._now - 1

    def has_ended(self, time: int) -> bool:
        with self._lock:
            return all(pin > time for pin in self._active)


class NodeLog:
    """Raises DiskOpenError from the constructor."""

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.path = directory / LOG_DIRECTORY
        self.pins = Pins()
        self._file_bytes = file_bytes
        self._lock = threading.Lock()  # of everything here that more than one thread uses
        self._names = threading.RLock()  # held while a file gets, changes or loses its name
        self._open: OrderedDict[int, LogFile] = OrderedDict()  # for reading, the longest unused first
        self._retired: list[tuple[int, LogFile]] = []  # until no read can reach them
        self.files: dict[int, LogFile] = {}
        self._spares: list[LogFile] = []
        self._next: tuple[LogFile, bytes] | None = None
        self._current: LogFile | None = None
        self._handle: _Handle | None = None  # of the current one
        self.end = Place(0, 0, 0, b"")  # where the next round goes
        self._values_at = 0  # of the last round
        self._written_to = 0  # in the current file, at least
        self.live_bytes = 0  # as the index counts them
        try:
            self.path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self._list()
            sync_directory(directory)
        except OSError as e:
            raise DiskOpenError(f"{self.path} cannot be used: {e.strerror}; correct its owner or mode") from e
        self._last_number = max((*self.files, *(spare.number for spare in self._spares)), default=0)

    def _list(self) -> None:
        for path in sorted(self.path.iterdir()):
            if path.suffix == NEW:
                path.unlink()
            elif path.suffix in (ROUNDS, SORTED, SPARE) and path.stem.isdecimal():
                file = LogFile(path, int(path.stem), path.stat().st_size)
                if path.suffix == SPARE and file.size == self._file_bytes:
                    self._spares.append(file)
                elif path.suffix == SPARE:
                    path.unlink()
                else:
                    self.files[file.number] = file

    # ------------------------------------------------------------------------------------------ appending
    def is_begun(self) -> bool:
        """Whether a process has ever written here."""
        return bool(self.files)

    def first_place(self) -> Place | None:
        """Where the log began, if that file is still there and is what it was."""
        file = self.files.get(1)
        head = file.head() if file is not None else None
        return Place(1, PAGE_BYTES, 1, head[1]) if head is not None else None

    def begin(self, number: int) -> Place:
        """A new file, for rounds from that number on."""
        file, generation = self._make_file(ROUNDS, self._wanted_size())
        self._turn_to(file, generation, number)
        return self.end

    def resume(self, place: Place) -> None:
        """Goes on where an orderly stop has ended."""
        file = self.files[place.file]
        self._current, self._handle = file, _Handle(file.path, os.O_RDWR | _WAITS)
        self.end, self._written_to = place, 0

    def _turn_to(self, file: LogFile, generation: bytes, number: int) -> None:
        with self._lock:
            self.files[file.number] = file
        self._current, self._handle = file, _Handle(file.path, os.O_RDWR | _WAITS)
        self.end = Place(file.number, PAGE_BYTES, number, generation)
        self._written_to = file.size if file.is_written else 0

    def append(self, made: Round) -> tuple[int, int]:
        """Returns the file, and where in it the batches lie, once the round is durable. OSError if that is not certain:
        nothing may be written any more."""
        size = frame_bytes(len(made.rows), sum(map(len, made.values)))
        assert self._current is not None
        if self.end.at + size > self._current.size - PAGE_BYTES:
            self._leave_file(size)
        place = self.end
        self._write(made)
        return place.file, self._values_at

    def _write(self, made: Round) -> None:
        """Small rounds go to bytes that have been written before: otherwise each changes metadata, and waits for the
        file system's journal."""
        assert self._handle is not None
        assert self._current is not None
        place, size = self.end, frame_bytes(len(made.rows), sum(map(len, made.values)))
        zeros = 0
        if size <= SMALL_BYTES and place.at + size > self._written_to:
            zeros = min(ZEROS_BYTES, self._current.size - place.at - size)
        end = write_frame(self._handle.fd, place.at, place.generation, place.number, made, zeros)
        self._written_to = max(self._written_to, end + zeros)
        self._values_at = place.at + head_bytes(len(made.rows))
        self.end = place._replace(at=end, number=place.number + 1)

    def _leave_file(self, size: int) -> None:
        """The frame that ends this file names the next one, which is whole by then."""
        needed = PAGE_BYTES + size + PAGE_BYTES
        if self._next is not None and self._next[0].size < needed:
            with self._lock:
                self.files[self._next[0].number] = self._next[0]  # empty: it is used again
            self._next = None
        if self._next is None:
            self._next = self._make_file(ROUNDS, max(self._wanted_size(), needed))
        file, generation = self._next
        self._next = None
        self._write(next_file_round(file.number, generation))
        self._turn_to(file, generation, self.end.number)

    def reserve(self) -> None:
        """Makes the next file once half of this one is used. If there is no space for it, a later call tries again."""
        assert self._current is not None
        if self._next is None and self.end.at * 2 >= self._current.size:
            with suppress(OSError):
                self._next = self._make_file(ROUNDS, self._wanted_size())

    def _wanted_size(self) -> int:
        """Never more than a quarter of what is free: the index needs space, too. Small on a small disk: what is dead in
        the current file comes back when the log has left it."""
        found = os.statvfs(self.path)
        free = self._free_bytes() + sum(spare.size for spare in self._spares)
        total = found.f_blocks * found.f_frsize
        size = min(self._file_bytes, max(FIRST_FILE_BYTES, self.live_bytes), free // 4, total // DISK_FILES_MIN)
        return max(size, min(FILE_BYTES_MIN, self._file_bytes)) // PAGE_BYTES * PAGE_BYTES

    def _free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def make_sorted(self, size: int) -> tuple[LogFile, bytes, int]:
        """A file that the collection fills, before `publish`: its generation, and a descriptor."""
        file, generation = self._make_file(NEW, size)
        return file, generation, os.open(file.path, os.O_RDWR | os.O_CLOEXEC)

    def publish(self, file: LogFile) -> None:
        """It is durable, name and all, afterwards."""
        with self._names:
            whole = file.path.with_suffix(SORTED)
            file.path.rename(whole)
            sync_directory(self.path)
            file.path = whole
            with self._lock:
                self.files[file.number] = file

    def _make_file(self, suffix: str, size: int) -> tuple[LogFile, bytes]:
        """A whole file with a generation of its own, or none. What a spare held is of another generation."""
        with self._names:
            with self._lock:
                self._last_number += 1
                number = self._last_number
                spare = next((file for file in self._spares if file.size == size), None)
                if spare is not None:
                    self._spares.remove(spare)
            if spare is None and (suffix == ROUNDS or size * 2 > self._free_bytes()):
                self.give_back()
            generation = new_generation()
            path = self.path / f"{number:010}{NEW}"
            try:
                if spare is not None:
                    spare.path.rename(path)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
                try:
                    if spare is None:
                        _reserve(fd, size)
                    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, number, generation, size)
                    os.pwrite(fd, (crc32c(body).to_bytes(_CRC_BYTES, "big") + body).ljust(PAGE_BYTES, b"\x00"), 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if suffix != NEW:
                    path.rename(path.with_suffix(suffix))
                    path = path.with_suffix(suffix)
                    sync_directory(self.path)
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
            file = LogFile(path, number, size)
            file.is_written = spare is not None
            return file, generation

    # --------------------------------------------------------------------------------------------- replaying
    def rounds_from(self, place: Place) -> Iterator[tuple[list[Op], Place]]:
        """The rounds from there on, each with the place after it. Raises LogDamaged if these are not all that may have
        been acknowledged."""
        while True:
            file = self.files.get(place.file)
            if file is None:
                raise LogDamaged(
                    self.path / f"{place.file:010}{ROUNDS}",
                    "it is missing, and holds the newest writes. If the directory was copied, copy all its files",
                )
            followed: tuple[int, bytes] | None = None
            try:
                for found in self._frames(file, place):
                    place = place._replace(at=found.end, number=found.number + 1)
                    if (followed := found.next_file()) is None:
                        yield found.changes(file.number), place
            except Rotten as e:
                raise LogDamaged(file.path, str(e)) from e
            except OSError as e:
                raise LogDamaged(file.path, f"it cannot be read: {e.strerror}") from e
            if followed is None:
                self._refuse_rounds_after(file)
                return
            place = Place(followed[0], PAGE_BYTES, place.number, followed[1])
            yield [], place

    def _refuse_rounds_after(self, last: LogFile) -> None:
        """A file that was made ahead has none."""
        for file in list(self.files.values()):
            if file.number > last.number and not file.is_sorted:
                head, handle = file.head(), _Handle(file.path)
                if head is None or is_begun(handle.fd, PAGE_BYTES, head[1]):
                    raise LogDamaged(last.path, f"it should name {file.path.name}, which holds newer rounds")

    def _frames(self, file: LogFile, place: Place) -> Iterator[Frame]:
        head = file.head()
        if head is None or head[1] != place.generation:
            raise Rotten("its first page is damaged, or it is not the file that the index names")
        if head[0] != file.size:
            raise Rotten(f"it has {file.size} bytes instead of {head[0]}")
        handle = _Handle(file.path)
        yield from frames(handle.fd, place.at, file.size, place.generation, place.number)

    def give_back_ahead(self, end: Place) -> None:
        """What an earlier process has made ahead is empty. Kept, each start would add one, and the disk may be full."""
        ahead = [file for file in self.files.values() if file.number > end.file and not file.is_sorted]
        for file in ahead:
            self._reclaim(file)
        if ahead:
            sync_directory(self.path)

    def close_torn(self, place: Place) -> Place:
        """After the last round that counts: a torn one may follow it, and must never be taken for a round. The log goes
        on in a new file, which the old one names."""
        file, generation = self._make_file(ROUNDS, self._wanted_size())
        self.resume(place)
        self._write(next_file_round(file.number, generation))
        self._turn_to(file, generation, self.end.number)
        return self.end

    def batches_of(self, file: LogFile) -> Iterator[Op]:
        """The rows of the batches that were written to it, wherever they are now. Raises Rotten or OSError."""
        head = file.head()
        if head is None:
            raise Rotten("its first page is damaged")
        handle = _Handle(file.path)
        number = first_number(handle.fd, PAGE_BYTES)
        for found in frames(handle.fd, PAGE_BYTES, file.size, head[1], number):
            yield from found.changes(file.number)

    def batches_bytes(self, file: LogFile) -> int:
        """Of all batches that a sorted file has held; its size if its frames cannot be read."""
        if not file.batches_bytes:
            with suppress(OSError, struct.error):  # of a file that is cut short
                head, handle = file.head(), _Handle(file.path)
                file.batches_bytes = values_bytes(handle.fd, PAGE_BYTES, file.size, head[1]) if head is not None else 0
        return file.batches_bytes or file.size

    # ------------------------------------------------------------------------------------------- reading
    def read(self, locations: list[Location | None]) -> list[bytes]:
        """The values, in order; empty for one that the medium cannot give. Neighbours are read as one. Within a pin."""
        values: list[bytes] = []
        at = 0
        while at < len(locations):
            first = locations[at]
            if first is None:
                values.append(b"")
                at += 1
                continue
            stop = at + 1
            length = first.length
            while (
                stop < len(locations)
                and (after := locations[stop]) is not None
                and after.file == first.file
                and after.at == first.at + length
                and length + after.length <= RUN_BYTES_MAX
            ):
                length += after.length
                stop += 1
            values += self._read_run(first, locations[at:stop], length)
            at = stop
        return values

    def _read_run(self, first: Location, run: list[Location | None], length: int) -> list[bytes]:
        data = self._pread(first.file, first.at, length)
        if len(run) == 1:
            return [data if len(data) == length else b""]
        if len(data) != length:  # one of them cannot be read
            return [self._read_run(one, [one], one.length)[0] for one in run if one is not None]
        values, at = [], 0
        for one in run:
            assert one is not None
            values.append(data[at : at + one.length])
            at += one.length
        return values

    def _pread(self, number: int, at: int, length: int) -> bytes:
        handle = self._handle_of(number)
        try:
            return os.pread(handle.fd, length, at) if handle is not None else b""
        except OSError:
            return b""

    def _handle_of(self, number: int) -> _Handle | None:
        with self._lock:
            file = self.files.get(number)
            if file is None:
                return None
            handle = file.handle
            if handle is None:
                try:
                    handle = file.handle = _Handle(file.path)
                except FileNotFoundError:
                    return None
            self._open[number] = file
            self._open.move_to_end(number)
            if len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)[1].handle = None
            return handle

    # -------------------------------------------------------------------------------------- using again
    def retire(self, numbers: list[int]) -> None:
        """Nothing that is durable names them any more. They go once no read can reach them."""
        time = self.pins.advance()
        self._retired += [(time, self.files[number]) for number in numbers]

    @property
    def retired(self) -> set[int]:
        return {file.number for _, file in self._retired}

    def reclaim(self) -> None:
        """Uses again, or removes, the files that no read can reach."""
        waiting: list[tuple[int, LogFile]] = []
        for time, file in self._retired:
            if self.pins.has_ended(time):
                self._reclaim(file)
            else:
                waiting.append((time, file))
        self._retired = waiting

    def _reclaim(self, file: LogFile) -> None:
        with self._names:
            with self._lock:
                del self.files[file.number]
                self._open.pop(file.number, None)
                file.handle = None
                is_kept = file.size == self._file_bytes and not self._spares
            spare = file.path.with_suffix(SPARE)
            if not is_kept:
                file.path.unlink(missing_ok=True)
                return
            try:
                file.path.rename(spare)
            except FileNotFoundError:  # it has vanished
                return
            file.path = spare
            with self._lock:
                self._spares.append(file)

    def give_back(self) -> None:
        """Removes the spare files: their space is needed otherwise."""
        with self._names:
            with self._lock:
                spares, self._spares = self._spares, []
            for spare in spares:
                spare.path.unlink()

    @property
    def reserved_bytes(self) -> int:
        """Of files that are there, and have room for rounds."""
        with self._lock:
            size = sum(spare.size for spare in self._spares)
        following, current = self._next, self._current
        size += following[0].size if following is not None else 0
        return size + (current.size - self.end.at if current is not None else 0)

    def size_bytes(self) -> int:
        with self._lock:
            size = sum(file.size for file in (*self.files.values(), *self._spares))
        return size + (self._next[0].size if self._next is not None else 0)

    def close(self) -> None:
        self._handle = None
        with self._lock:
            for file in self.files.values():
                file.handle = None
            self._open.clear()


def _reserve(fd: int, size: int) -> None:
    allocate = getattr(os, "posix_fallocate", None)  # which macOS does not have
    try:
        if allocate is not None:
            allocate(fd, 0, size)
            return
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of a file system that cannot
            raise
    os.ftruncate(fd, size)


def new_generation() -> bytes:
    """Random, so that nothing written before, and nothing that a client sends, looks like it; and never zeros, which
    are what was never written."""
    while not any((generation := os.urandom(GENERATION_BYTES))[:4]):
        pass
    return generation
