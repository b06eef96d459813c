"""Reads rows from LMDB's file by page, without its memory map.

LMDB reads through a map, so a page that the medium cannot give ends the process by SIGBUS, wherever it is touched. Here
the same pages come by `pread`, which reports an error. Owns the knowledge of LMDB 0.9's page format, for reading only,
with one exception: LMDB itself touches the pages of a value when its row is replaced or deleted, so right before that,
those that still cannot be read are overwritten. LMDB believes every page number, so rows whose pages may belong to
another row are found here before LMDB frees them. The caller holds a transaction of LMDB's, so that no page of its
snapshot is reused. It must never know what keys and values mean. Only the real disk imports it.
"""

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from smq.replication.storage.rows import HomeOf, Row

_PAGE: Final = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper; of an overflow page the last two: a count
_OVERFLOW_PAGE: Final = struct.Struct("<QHHI")
_NODE: Final = struct.Struct("<HHHH")  # low, high, flags, key size
_DB: Final = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META: Final = struct.Struct("<IIQQ48s48sQQ")  # magic, version, address, map size, two tables, last page, transaction
_PAGE_NUMBER: Final = struct.Struct("<Q")
_HEADER: Final = _PAGE.size
_MAGIC: Final = 0xBEEFC0DE
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04  # flags of pages
_ON_OVERFLOW: Final = 0x01  # flag of a node: its value has pages of its own
_NO_ROOT: Final = (1 << 64) - 1
_DEPTH_MAX: Final = 32  # as LMDB's
_FIRST_PAGE: Final = 2  # after the two meta pages
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)  # Linux
UNREADABLE_MAX: Final = 10_000  # values: a disk with more of them is not worth a repair
AHEAD_FACTOR: Final = 16  # values read together once two have followed one another
AHEAD_BYTES_MAX: Final = 1 << 20
VALUE_BYTES_MAX: Final = 128 << 20  # above the largest batch; a flipped bit in a size must not ask for gigabytes
_Level = tuple["_Page", int]  # a page on the way down, and the node taken
_Read = Callable[[int, int, int], bytes | memoryview]  # of this many bytes of a file, at this place


class PagesDamaged(Exception):
    """The pages are not a tree of LMDB's, or a page of the tree itself cannot be read."""


class Unreadable(Exception):
    """The medium cannot give a page, or the file ends before it."""


class NotCached(Exception):
    """A page is not in memory."""


class SnapshotGone(Exception):
    """Two newer transactions have been committed: begin another read transaction, and try again."""


# The last three: what no check of a page's numbers has caught
TREE_DAMAGE: Final = (PagesDamaged, SnapshotGone, struct.error, IndexError, OverflowError, ValueError)


class _Page:
    """A branch or a leaf, with its keys sorted."""

    __slots__ = ("count", "data", "is_leaf", "places")

    def __init__(self, data: bytes, number: int) -> None:
        found, _, flags, lower, _ = _PAGE.unpack_from(data)
        if found != number or not flags & (_BRANCH | _LEAF) or not _HEADER <= lower <= len(data):
            raise PagesDamaged(f"page {number} is no part of a tree")
        self.data = data
        self.is_leaf = bool(flags & _LEAF)
        self.count = (lower - _HEADER) // 2
        self.places = struct.unpack_from(f"<{self.count}H", data, _HEADER)
        if not self.places:
            is_sound = self.is_leaf
        else:
            is_sound = min(self.places) >= lower and max(self.places) <= len(data) - _NODE.size
        if not is_sound:
            raise PagesDamaged(f"page {number} has no nodes, or nodes outside of it")

    def node(self, index: int) -> tuple[int, int, int, int]:
        """(offset of the key, its size, flags, value size); of a branch, the last two hold the child's number."""
        at = self.places[index]
        low, high, flags, key_size = _NODE.unpack_from(self.data, at)
        end = at + _NODE.size + key_size
        if self.is_leaf:
            end += _PAGE_NUMBER.size if flags & _ON_OVERFLOW else low | high << 16
        if end > len(self.data):
            raise PagesDamaged("a node of the tree ends outside its page")
        return at + _NODE.size, key_size, flags, low | high << 16

    def row(self, index: int) -> tuple[bytes, int, int, bool]:
        """Of a leaf's node: the key, and of its value (place, size, False), or (place of a page number, size, True) if
        it has pages of its own."""
        data = self.data
        key_at = self.places[index] + _NODE.size
        low, high, flags, key_size = _NODE.unpack_from(data, key_at - _NODE.size)
        at, size, is_outside = key_at + key_size, low | high << 16, bool(flags & _ON_OVERFLOW)
        if at + (_PAGE_NUMBER.size if is_outside else size) > len(data):
            raise PagesDamaged("a node of the tree ends outside its page")
        return data[key_at:at], at, size, is_outside

    def key(self, index: int) -> bytes:
        at = self.places[index] + _NODE.size
        end = at + (self.data[at - 2] | self.data[at - 1] << 8)
        if end > len(self.data):
            raise PagesDamaged("a key of the tree ends outside its page")
        return self.data[at:end]

    def child(self, index: int) -> int:
        _, _, flags, low = self.node(index)
        return low | flags << 32

    def search(self, key: bytes) -> tuple[int, bool]:
        """(index of the first key that is not smaller, or `count`; whether it is equal). Step by step as LMDB, with the
        same result in a page whose keys are out of order: what it wrote there must be found. The first key of a branch
        is below all."""
        low, high = (0 if self.is_leaf else 1), self.count - 1
        index, is_after = 0, False
        while low <= high:
            index = (low + high) >> 1
            found = self.key(index)
            if found == key:
                return index, True
            is_after = key > found
            if is_after:
                low = index + 1
            else:
                high = index - 1
        return index + is_after, False

    def child_for(self, key: bytes) -> int:
        """The index of the child that a search for the key descends to."""
        index, is_equal = self.search(key)
        return self.count - 1 if index >= self.count else index if is_equal else max(index - 1, 0)


def _page_number(page: _Page, index: int) -> int:
    """Where the pages of a node's value begin, if it has its own."""
    number: int = _PAGE_NUMBER.unpack_from(page.data, page.row(index)[1])[0]
    return number


class PageFile:
    """LMDB's data file. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page_bytes = _DB.unpack(_META.unpack(os.pread(self._fd, _META.size, _HEADER))[4])[0]
        self.unreadable: dict[tuple[bytes, bytes], None] = {}  # (table, key) of such values; UNREADABLE_MAX
        self._buffers = _Buffers(self._page_bytes)

    def close(self) -> None:
        os.close(self._fd)

    def reader(self, *, cached_only: bool) -> "PageReader":
        """For one read. With `cached_only` it never waits for the medium, and raises NotCached instead; its thread must
        have ended that read before it begins another."""
        if cached_only:
            read_page, read_values = self._buffers.read_page, self._buffers.read_values
            return PageReader(self._fd, self._page_bytes, read_page, read_values, self._note_unreadable)
        return PageReader(self._fd, self._page_bytes, os.pread, os.pread, self._note_unreadable)

    def _note_unreadable(self, table: bytes, key: bytes) -> None:
        if len(self.unreadable) < UNREADABLE_MAX:
            self.unreadable[table, key] = None

    def make_replaceable(self, transaction: int, table: bytes, start: bytes, stop: bytes) -> None:
        """Before the rows in [start, stop) are replaced or deleted, by the one writer, whose newest committed
        transaction is named. Raises PagesDamaged if pages to overwrite may belong to another row."""
        for noted in [n for n in list(self.unreadable) if n[0] == table and start <= n[1] < stop]:
            del self.unreadable[noted]
            self.reader(cached_only=False).make_readable(transaction, *noted)


class _Buffers(threading.local):
    """Where a thread's reads from the page cache go: new memory would have to be cleared each time."""

    def __init__(self, page_bytes: int) -> None:
        self._page = memoryview(bytearray(page_bytes))
        self._values = memoryview(bytearray(AHEAD_BYTES_MAX))

    def read_page(self, fd: int, size: int, at: int) -> memoryview:
        """Valid until the next page is read. Raises NotCached."""
        return _read_cached(fd, self._page[:size], at)

    def read_values(self, fd: int, size: int, at: int) -> memoryview:
        """Valid until the next values are read. Raises NotCached."""
        buffer = self._values[:size] if size <= AHEAD_BYTES_MAX else memoryview(bytearray(size))
        return _read_cached(fd, buffer, at)


def _read_cached(fd: int, buffer: memoryview, at: int) -> memoryview:
    try:
        found = os.preadv(fd, [buffer], at, _NOWAIT) if _NOWAIT is not None else 0
    except OSError as e:  # not cached; or a file system that cannot tell
        raise NotCached from e
    if found < len(buffer):
        raise NotCached
    return buffer


class PageReader:
    """One read in one transaction of LMDB's."""

    def __init__(
        self,
        fd: int,
        page_bytes: int,
        read_page: _Read,
        read_values: _Read,
        note_unreadable: Callable[[bytes, bytes], None],
    ) -> None:
        self._note_unreadable = note_unreadable
        self._table = b""
        self._fd = fd
        self._page_bytes = page_bytes
        self._read_page = read_page
        self._read_values = read_values
        self._bytes_left = 0  # of the values that are wanted
        self._ahead = memoryview(b"")  # the last value and what follows it: its successor usually does
        self._ahead_at = 0
        self._next_value_at = -1  # where the successor lies if it follows on
        self._last_page = 1  # of the transaction
        self._main: int | None = None  # of the transaction, once it has been read

    def rows(
        self,
        transaction: int,
        table: bytes,
        start: bytes,
        stop: bytes,
        *,
        lowest: bytes | None = None,
        reverse: bool = False,
        bytes_wanted: int = 1 << 62,
    ) -> Iterator[Row]:
        """The rows in [start, stop) as of a transaction that is being held, ascending or descending. With `lowest`, the
        last one in [lowest, start] comes first if there is one. Ascending values beyond `bytes_wanted` in total are not
        read ahead, but the rows go on: only the caller, who merges them with others, knows where to end. Raises
        PagesDamaged, SnapshotGone."""
        self._table = table
        self._bytes_left = bytes_wanted
        root = self._root_of(transaction, table)
        if root == _NO_ROOT:
            return
        if reverse:
            yield from self._backward(self._descend(root, stop), start, stop)
        else:
            yield from self._forward(self._descend(root, start), start, stop, lowest)

    def _forward(self, path: list[_Level], start: bytes, stop: bytes, lowest: bytes | None) -> Iterator[Row]:
        if lowest is not None and self._key_at(list(path)) != start:
            before = list(path)
            if self._step_back(before) and before[-1][0].key(before[-1][1]) >= lowest:
                path = before
        while self._key_at(path) is not None:
            page, first = path[-1]
            for index in range(first, page.count):
                key, at, size, is_outside = page.row(index)
                if key >= stop:
                    return
                yield key, size, partial(self._value, page, key, at, size, is_outside)
                self._bytes_left -= size
            path[-1] = (page, page.count)

    def _backward(self, path: list[_Level], start: bytes, stop: bytes) -> Iterator[Row]:
        while self._step_back(path):
            page, index = path[-1]
            key, at, size, is_outside = page.row(index)
            if key < start:
                return
            if key < stop:  # a flipped bit may have turned an earlier row's key into a larger one
                yield key, size, partial(self._value, page, key, at, size, is_outside)

    # ------------------------------------------------------------------------------------------- the tree
    def _root_of(self, transaction: int, table: bytes) -> int:
        if self._main is None:
            self._main = self._main_of(transaction)
        path = self._descend(self._main, table)
        if self._key_at(path) != table:
            raise PagesDamaged(f"table {table!r} is missing")
        page, index = path[-1]
        root: int = _DB.unpack(self._value(page, *page.row(index)))[-1]
        return root

    def _main_of(self, transaction: int) -> int:
        """The root of the tree of tables. Read once: newer transactions overwrite it, but no page of the tree."""
        for number in (0, 1):
            magic, _, _, _, _, main, last_page, found = _META.unpack(
                self._tree_bytes(_META.size, number * self._page_bytes + _HEADER)
            )
            if magic == _MAGIC and found == transaction:
                self._last_page = last_page
                root: int = _DB.unpack(main)[-1]
                return root
        raise SnapshotGone

    def _descend(self, number: int, key: bytes) -> list[_Level]:
        """The way to the first key in the leaf that is not smaller; the index may be one past the leaf's end."""
        path: list[_Level] = []
        while len(path) < _DEPTH_MAX:
            page = self._page(number)
            if page.is_leaf:
                path.append((page, page.search(key)[0]))
                return path
            index = page.child_for(key)
            path.append((page, index))
            number = page.child(index)
        raise PagesDamaged("the tree is too deep")

    def _key_at(self, path: list[_Level]) -> bytes | None:
        """The key at the position, after moving it to the next leaf if it is one past the end of its own."""
        page, index = path[-1]
        if index >= page.count and not self._next_leaf(path):
            return None
        page, index = path[-1]
        return page.key(index)

    def _next_leaf(self, path: list[_Level]) -> bool:
        depth = len(path) - 2
        while depth >= 0 and path[depth][1] + 1 >= path[depth][0].count:
            depth -= 1
        if depth < 0:
            return False
        self._walk(path, depth, path[depth][1] + 1, at_end=False)
        return True

    def _step_back(self, path: list[_Level]) -> bool:
        """To the node before the position; False if there is none."""
        page, index = path[-1]
        if index > 0:
            path[-1] = (page, index - 1)
            return True
        depth = len(path) - 2
        while depth >= 0 and path[depth][1] == 0:
            depth -= 1
        if depth < 0:
            return False
        self._walk(path, depth, path[depth][1] - 1, at_end=True)
        return True

    def _walk(self, path: list[_Level], depth: int, index: int, *, at_end: bool) -> None:
        """Replaces the way from `depth` on by the way to the first, or last, node below this child."""
        page = path[depth][0]
        path[depth:] = [(page, index)]
        while not page.is_leaf:
            if len(path) > _DEPTH_MAX:
                raise PagesDamaged("the tree is too deep")
            page = self._page(page.child(index))
            if not page.count:
                raise PagesDamaged("a page of the tree is empty")
            index = page.count - 1 if at_end else 0
            path.append((page, index))

    # ------------------------------------------------------------------------------------------- the file
    def _page(self, number: int) -> _Page:
        if number > self._last_page:
            raise PagesDamaged(f"page {number} is named, but {self._last_page} is the last")
        return _Page(bytes(self._tree_bytes(self._page_bytes, number * self._page_bytes)), number)

    def _tree_bytes(self, size: int, at: int) -> bytes | memoryview:
        try:
            return self._pread(size, at)
        except Unreadable as e:
            raise PagesDamaged(str(e)) from e

    def _pread(self, size: int, at: int) -> bytes | memoryview:
        return self._whole(self._read_page, size, at)

    def _whole(self, read: _Read, size: int, at: int) -> bytes | memoryview:
        try:
            data = read(self._fd, size, at)
        except OSError as e:
            raise Unreadable(f"the file cannot be read at byte {at}: {e.strerror}") from e
        if len(data) < size:
            raise Unreadable(f"the file ends before byte {at + size}")
        return data

    def _value(self, page: _Page, key: bytes, at: int, size: int, is_outside: bool) -> bytes:
        if not is_outside:
            return page.data[at : at + size]
        count = self._pages_of(size)
        first = self._first_page(page, at, size, count)
        try:
            found = self._read_ahead(first * self._page_bytes, _HEADER + size, count)
        except Unreadable:
            self._note_unreadable(self._table, key)
            return b""
        self._check_header(found, first, count)
        return bytes(found[_HEADER:])

    def _first_page(self, page: _Page, at: int, size: int, count: int) -> int:
        """The first of a value's own pages, all of which lie in the file. Its number stands at `at`."""
        first: int = _PAGE_NUMBER.unpack_from(page.data, at)[0]
        if not _FIRST_PAGE <= first <= self._last_page + 1 - count or size > VALUE_BYTES_MAX:
            raise PagesDamaged(f"a row names {size} bytes at page {first}, but {self._last_page} is the last page")
        return first

    def _check_header(self, data: bytes | memoryview, first: int, count: int) -> None:
        """LMDB frees as many pages as this header says, beginning with the number in it."""
        number, _, flags, found = _OVERFLOW_PAGE.unpack_from(data)
        if number != first or flags != _OVERFLOW or not count <= found <= self._last_page + 1 - first:
            raise PagesDamaged(f"page {first}, which a row names, is not the first page of its value")

    def _read_ahead(self, at: int, size: int, page_count: int) -> memoryview:
        """Values written together lie one after the other: the second of a run brings those that follow and are wanted,
        in a larger piece each time, because each call may have to wait for the interpreter's lock."""
        offset = at - self._ahead_at
        if offset < 0 or offset + size > len(self._ahead):
            is_run = at == self._next_value_at
            self._ahead, self._ahead_at, offset = memoryview(b""), at, 0
            wanted = min(AHEAD_FACTOR * size, AHEAD_BYTES_MAX, self._bytes_left) if is_run else size
            if wanted > size:
                with suppress(Unreadable, NotCached):
                    self._ahead = memoryview(self._whole(self._read_values, wanted, at))
            if not self._ahead:
                self._ahead = memoryview(self._whole(self._read_values, size, at))
        self._next_value_at = at + page_count * self._page_bytes
        return self._ahead[offset : offset + size]

    def _pages_of(self, size: int) -> int:
        return (_HEADER - 1 + size) // self._page_bytes + 1

    # ------------------------------------------------------------------------------------------- before LMDB frees
    def check_freeable(
        self,
        transaction: int,
        table: bytes,
        start: bytes,
        stop: bytes,
        home_of: HomeOf,
        owner_bytes: int,
        more_owners: Callable[[int], Iterable[bytes]],
    ) -> None:
        """Before the rows in [start, stop) are deleted. Raises PagesDamaged if a row names pages that are not its own:
        LMDB would free them, and use them again while they hold the value of another row.

        `home_of` returns the key that belongs to an intact value of an owner; the rows of one owner share the first
        bytes of their keys. `more_owners` returns those bytes of owners whose rows may not be in the file yet: pages
        that they gave back may be. A value under another key shows that the page number or the key is damaged. With a
        damaged key the row still lies where the right key belongs, and may be deleted.
        """
        root = self._root_of(transaction, table)
        path = self._descend(root, start) if root != _NO_ROOT else []
        while path and (key := self._key_at(path)) is not None and key < stop:
            page, index = path[-1]
            _, at, size, is_outside = page.row(index)
            if is_outside:
                count = self._pages_of(size)
                first = self._first_page(page, at, size, count)
                with suppress(Unreadable):  # it is overwritten next
                    head = bytes(self._pread(self._page_bytes, first * self._page_bytes))  # LMDB touches it anyway
                    self._check_header(head, first, count)
                    value = head[_HEADER : _HEADER + size]
                    home = home_of(key, value)
                    if home is None:
                        owners = chain(self._owners(root, owner_bytes), more_owners(owner_bytes))
                        home = next((found for owner in owners if (found := home_of(owner, value)) is not None), None)
                    if home is not None and home != key and not self._is_place_of(home, key, path):
                        raise PagesDamaged(f"the row {key.hex()} names the pages of another row, {home.hex()}")
            path[-1] = (page, index + 1)

    def _owners(self, root: int, owner_bytes: int) -> Iterator[bytes]:
        """A key of each that has rows. The value is damaged, or another owner's: some 30 us for each to ask."""
        path = self._descend(root, b"")
        while (key := self._key_at(path)) is not None:
            yield key
            path = self._descend(root, key[:owner_bytes].ljust(len(key) + 1, b"\xff"))

    def _is_place_of(self, home: bytes, key: bytes, path: list[_Level]) -> bool:
        """Whether `key`, at the end of the path, is `home` with a flipped bit: then `home` fits between the rows before
        and after. One of them may be `home` itself, put back by a repair: that one has other pages."""
        if len(home) != len(key) or (int.from_bytes(home) ^ int.from_bytes(key)).bit_count() != 1:
            return False
        page, index = path[-1]
        before, after = list(path), [*path[:-1], (page, index + 1)]
        below = before[-1] if self._step_back(before) else None
        above = after[-1] if self._key_at(after) is not None else None  # it may have moved to the next leaf
        if (below and below[0].key(below[1]) > home) or (above and above[0].key(above[1]) < home):
            return False
        number = _page_number(page, index)
        return not any(n and n[0].key(n[1]) == home and _page_number(*n) == number for n in (below, above))

    def make_readable(self, transaction: int, table: bytes, key: bytes) -> None:
        """Overwrites the pages of a value that cannot be read. A medium gives a page again once it has been written, or
        takes another in its place. The first page keeps the header that LMDB needs to free them all. Raises
        PagesDamaged before it touches pages that may not be the value's."""
        root = self._root_of(transaction, table)
        path = self._descend(root, key) if root != _NO_ROOT else []
        if not path or self._key_at(path) != key:
            return
        page, index = path[-1]
        _, at, size, is_outside = page.row(index)
        if not is_outside:
            return
        count = self._pages_of(size)
        first = self._first_page(page, at, size, count)
        with suppress(Unreadable):
            self._check_header(self._pread(_HEADER, first * self._page_bytes), first, count)
        for number in range(first, first + count):
            at = number * self._page_bytes
            try:
                self._pread(self._page_bytes, at)
            except Unreadable:
                header = _OVERFLOW_PAGE.pack(first, 0, _OVERFLOW, count) if number == first else b""
                self._overwrite(header.ljust(self._page_bytes, b"\x00"), at)

    def _overwrite(self, data: bytes, at: int) -> None:
        try:
            os.pwrite(self._fd, data, at)
        except OSError as e:
            raise PagesDamaged(f"the file can be neither read nor written at byte {at}: {e.strerror}") from e
