"""Refuses SQLite's own journal if a commit in it has rotted: SQLite would go back to before that commit, silently.

Owns the knowledge of the journal's format, and writes nothing but its end. A commit that a power loss has torn was not
acknowledged, and is the last one: what follows a commit was written after it had become durable. So a commit that does
not match its checksum and that another commit follows has changed on the disk. (One that none follows looks like a torn
one.) Every start cuts off a torn commit and begins a new journal, so that nothing else can follow. It must run before
SQLite has opened the file.

    header: magic, version, page size, number, two salts, two checksums
    frame:  page, pages of the file (0 unless it ends a commit), two salts, two checksums; then the page

All are u32, big-endian. The checksums continue from frame to frame.
"""

import os
import struct
import sys
from array import array
from pathlib import Path
from typing import Final

from smq.replication.storage.directory import REPLACE_ADVICE, DiskOpenError

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_CHECKED_OF_HEADER: Final = 24
_CHECKED_OF_FRAME: Final = 8
_MAGIC: Final = 0x377F0682  # the lowest bit: checksums are of big-endian words
_PAGE_BYTES_MAX: Final = 1 << 16
_SECTOR_BYTES: Final = 512  # what a power loss leaves whole
_SPLIT_AT: Final = (
    _SECTOR_BYTES - 8
)  # a frame that begins here has its salts in the next sector: they say nothing of it
_WORD: Final = 0xFFFFFFFF
_Sums = tuple[int, int]


class JournalDamaged(DiskOpenError):
    """The journal has lost or changed a commit that may have been acknowledged."""


def whole_journal(path: Path) -> int:
    """Its bytes up to the end of the last whole commit, the header included; 0 if there is none, or only zeros. Raises
    JournalDamaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise JournalDamaged(f"{path} cannot be read: {e.strerror}. {REPLACE_ADVICE}") from e
    if not any(data):
        return 0
    if len(data) < _HEADER.size or not (page_bytes := _page_bytes(data)):
        raise JournalDamaged(f"{path} is damaged: its header has changed. {REPLACE_ADVICE}")
    whole, first_wrong = _whole(data, page_bytes)
    if _has_two_commits(data, page_bytes, whole):
        raise JournalDamaged(
            f"{path} is damaged: a commit at byte {first_wrong} does not match its checksum. {REPLACE_ADVICE}"
        )
    return whole


def cut_journal(path: Path, size: int) -> None:
    """Removes what a power loss has torn, durably: the next commit may have the salts of the torn one."""
    if path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def _page_bytes(data: bytes) -> int:
    """0 if the header has changed."""
    magic, _, size, _, _, _, *sums = _HEADER.unpack_from(data)
    is_known = magic & ~1 == _MAGIC and 0 < size <= _PAGE_BYTES_MAX
    return size if is_known and _added(data[:_CHECKED_OF_HEADER], (0, 0), magic) == tuple(sums) else 0


def _whole(data: bytes, page_bytes: int) -> tuple[int, int]:
    """Where the last whole commit ends, and where the first frame begins that is not of this journal or does not match
    (the end if there is none)."""
    magic, *_, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack_from(data)
    sums = sum_1, sum_2
    whole = _HEADER.size
    for at in _frames(data, page_bytes):
        _, pages, *salts, found_1, found_2 = _FRAME.unpack_from(data, at)
        sums = _added(data[at : at + _CHECKED_OF_FRAME], sums, magic)
        sums = _added(data[at + _FRAME.size : at + _FRAME.size + page_bytes], sums, magic)
        if salts != [salt_1, salt_2] or sums != (found_1, found_2):
            return whole, at
        if pages:
            whole = at + _FRAME.size + page_bytes
    return whole, len(data)


def _has_two_commits(data: bytes, page_bytes: int, start: int) -> bool:
    """Whether the frames of this journal from there on are of more than one commit: one of them ends a commit and
    another one follows, or two have the same page. (A commit has a page once, unless in the frame that ends it: SQLite
    writes a page that has changed again over its own frame. And each commit of ours changes the file's first page.)"""
    salts = _HEADER.unpack_from(data)[4:6]
    pages_seen: set[int] = set()
    has_commit = False
    for at in _frames(data, page_bytes, start):
        page, pages, *found, _, _ = _FRAME.unpack_from(data, at)
        if tuple(found) != salts:
            continue
        if has_commit:
            return True
        if at % _SECTOR_BYTES == _SPLIT_AT:
            continue
        if pages:
            has_commit = True
        elif page in pages_seen:
            return True
        else:
            pages_seen.add(page)
    return False


def _frames(data: bytes, page_bytes: int, start: int = _HEADER.size) -> range:
    size = _FRAME.size + page_bytes
    return range(start, len(data) - size + 1, size)


def _added(data: bytes, sums: _Sums, magic: int) -> _Sums:
    words = array("I", data)
    if (sys.byteorder == "big") != bool(magic & 1):
        words.byteswap()
    first, second = sums
    for even, odd in zip(words[0::2], words[1::2], strict=True):
        first = first + even + second & _WORD
        second = second + odd + first & _WORD
    return first, second
