"""The newest offset of each key in a stretch of a log, in bounded memory: what one pass of compaction knows.

Owns the table: 16 bytes per slot, of which at most four fifths are in use, so ten million keys take 200 MB. A key is
known by 88 bits of its BLAKE2b digest: among ten million keys, two share them once in 10**12 passes. It must never
forget a key: a full table refuses the next one. Keys come and are asked for in lists, a batch at a time, because what
is done per record is what a pass costs. Only compaction uses it.
"""

from collections.abc import Iterator
from hashlib import blake2b
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import Final

from smq.raft_state.ids import Offset

_DIGEST: Final = Struct(">QI")
_OFFSET_BITS: Final = 40  # counted from the table's start, plus one: 0 is a free slot
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_MARK_MASK: Final = 0xFFFFFF << _OFFSET_BITS  # the rest of the digest
_SLOT_BYTES: Final = 16
_SLOTS_MIN: Final = 8


class KeyTable:
    def __init__(self, start: Offset, keys_max: int) -> None:
        """For offsets from `start` on, and for up to `keys_max` keys."""
        self._start = start
        self._slot_count = max(_SLOTS_MIN, keys_max * 5 // 4)
        self._hashes = _zeros(self._slot_count)
        self._places = _zeros(self._slot_count)  # 24 bits of the digest, and the offset
        self._keys_max = keys_max
        self.count = 0

    @staticmethod
    def keys_in(size: int) -> int:
        """How many keys fit into a table of this size."""
        return size // _SLOT_BYTES * 4 // 5

    def has_room(self, keys: int, end: Offset) -> bool:
        """Whether that number of keys below `end` can still be added, even if each is new."""
        return self.count + keys <= self._keys_max and end - self._start <= _OFFSET_MASK

    def add(self, keys: list[tuple[bytes, int]]) -> None:
        """Keys and their offsets, which ascend. ValueError if a key is new and the table is full."""
        hashes, places, slots, before = self._hashes, self._places, self._slot_count, self._start - 1
        for (hashed, rest), (_, offset) in zip(_digests([key for key, _ in keys]), keys, strict=True):
            mark, at = rest << _OFFSET_BITS & _MARK_MASK, hashed % slots
            while (place := places[at]) and (hashes[at] != hashed or place & _MARK_MASK != mark):
                at = at + 1 if at + 1 < slots else 0
            if not place:
                if self.count >= self._keys_max:
                    raise ValueError(f"the table holds {self.count} keys, which is its limit")
                self.count += 1
                hashes[at] = hashed
            places[at] = mark | (offset - before)

    def newest(self, keys: list[bytes]) -> list[int]:
        """Where each key was added last; -1 if it never was."""
        hashes, places, slots, before = self._hashes, self._places, self._slot_count, self._start - 1
        found = []
        for hashed, rest in _digests(keys):
            mark, at = rest << _OFFSET_BITS & _MARK_MASK, hashed % slots
            while (place := places[at]) and (hashes[at] != hashed or place & _MARK_MASK != mark):
                at = at + 1 if at + 1 < slots else 0
            found.append((place & _OFFSET_MASK) + before if place else -1)
        return found


def _zeros(count: int) -> memoryview:
    """The system gives the memory as it is touched: a hundred megabytes in one go would hold the loop up."""
    return memoryview(mmap(-1, count * 8, flags=MAP_PRIVATE | MAP_ANONYMOUS)).cast("Q")


def _digests(keys: list[bytes]) -> Iterator[tuple[int, int]]:
    """The hash of each key, and what makes up its mark."""
    return _DIGEST.iter_unpack(b"".join([blake2b(key, digest_size=_DIGEST.size).digest() for key in keys]))
