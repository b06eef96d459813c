"""Refuses SQLite's own journal if a commit in it has rotted: SQLite would go back to before that commit, silently.

Owns the knowledge of the journal's format, for reading only. A commit that a power loss has torn was not acknowledged,
and is the last one: what follows a commit was written after it had become durable. So a commit that does not match its
checksum and that other pages follow has changed on the disk. (One that nothing follows looks like a torn one.) Every
start begins a new journal, so that nothing else can follow. It must run before SQLite has opened the file.

    header: magic, version, page size, number, two salts, two checksums
    frame:  page, pages of the file (0 unless it ends a commit), two salts, two checksums; then the page

All are u32, big-endian. The checksums continue from frame to frame.
"""

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
_WORD: Final = 0xFFFFFFFF
_Sums = tuple[int, int]


class JournalDamaged(DiskOpenError):
    """The journal has lost or changed a commit that may have been acknowledged."""


def refuse_damaged_journal(path: Path) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # as after an orderly stop
    except OSError as e:
        raise JournalDamaged(f"{path} cannot be read: {e.strerror}. {REPLACE_ADVICE}") from e
    if not any(data[: _HEADER.size]):
        return  # made, and never durable
    if len(data) < _HEADER.size or not (page_bytes := _page_bytes(data)):
        raise JournalDamaged(f"{path} is damaged: its header has changed. {REPLACE_ADVICE}")
    first_wrong = _first_wrong(data, page_bytes)
    if first_wrong is not None and _is_followed_commit(data, page_bytes, first_wrong):
        raise JournalDamaged(
            f"{path} is damaged: a commit at byte {first_wrong} does not match its checksum. {REPLACE_ADVICE}"
        )


def _page_bytes(data: bytes) -> int:
    """0 if the header has changed."""
    magic, _, size, _, _, _, *sums = _HEADER.unpack_from(data)
    is_known = magic & ~1 == _MAGIC and 0 < size <= _PAGE_BYTES_MAX
    return size if is_known and _added(data[:_CHECKED_OF_HEADER], (0, 0), magic) == tuple(sums) else 0


def _first_wrong(data: bytes, page_bytes: int) -> int | None:
    """Where the first frame begins that is of this journal and does not match; None if there is none."""
    magic, *_, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack_from(data)
    sums = sum_1, sum_2
    for at in _frames(data, page_bytes):
        _, _, *salts, found_1, found_2 = _FRAME.unpack_from(data, at)
        sums = _added(data[at : at + _CHECKED_OF_FRAME], sums, magic)
        sums = _added(data[at + _FRAME.size : at + _FRAME.size + page_bytes], sums, magic)
        if salts != [salt_1, salt_2] or sums != (found_1, found_2):
            return at
    return None


def _is_followed_commit(data: bytes, page_bytes: int, start: int) -> bool:
    """Whether from there on a frame of this journal ends a commit, and another one of this journal comes after it."""
    salts = _HEADER.unpack_from(data)[4:6]
    has_commit = False
    for at in _frames(data, page_bytes, start):
        _, pages, *found, _, _ = _FRAME.unpack_from(data, at)
        if tuple(found) == salts:
            if has_commit:
                return True
            has_commit = pages > 0
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
