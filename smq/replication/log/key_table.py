"""The newest offset of each key in a stretch of a log, in bounded memory: what one pass of compaction knows.

Owns the table: 18 bytes per slot, of which at most four fifths are in use, so ten million keys take 225 MB. A key is
known by 96 bits of its BLAKE2b digest: among ten million keys, two share them once in 10**15 passes. It must never
forget a key: a full table refuses the next one. Only compaction uses it.
"""

from hashlib import blake2b
from typing import Final

from smq.raft_state.ids import Offset

_HASH_BYTES: Final = 12
_OFFSET_BYTES: Final = 6  # counted from the table's start, plus one: 0 is a free slot
_SLOT_BYTES: Final = _HASH_BYTES + _OFFSET_BYTES
_SLOTS_MIN: Final = 8


class KeyTable:
    def __init__(self, start: Offset, keys_max: int) -> None:
        """For offsets from `start` on, and for up to `keys_max` keys."""
        self._start = start
        self._slot_count = max(_SLOTS_MIN, keys_max * 5 // 4)
        self._slots = bytearray(self._slot_count * _SLOT_BYTES)  # the system gives the memory as it is touched
        self._keys_max = keys_max
        self.count = 0

    @staticmethod
    def keys_in(size: int) -> int:
        """How many keys fit into a table of this size."""
        return size // _SLOT_BYTES * 4 // 5

    def has_room(self, keys: int) -> bool:
        """Whether that number of keys can still be added, even if each is new."""
        return self.count + keys <= self._keys_max

    def add(self, key: bytes, offset: Offset) -> None:
        """Offsets come in ascending order. ValueError if the key is new and the table is full."""
        digest = blake2b(key, digest_size=_HASH_BYTES).digest()
        at = self._find(digest)
        slots = self._slots
        if not any(slots[at + _HASH_BYTES : at + _SLOT_BYTES]):
            if self.count >= self._keys_max:
                raise ValueError(f"the table holds {self.count} keys, which is its limit")
            self.count += 1
            slots[at : at + _HASH_BYTES] = digest
        slots[at + _HASH_BYTES : at + _SLOT_BYTES] = (offset - self._start + 1).to_bytes(_OFFSET_BYTES, "big")

    def newest(self, key: bytes) -> Offset:
        """Where the key was added last; -1 if it never was."""
        at = self._find(blake2b(key, digest_size=_HASH_BYTES).digest())
        stored = int.from_bytes(self._slots[at + _HASH_BYTES : at + _SLOT_BYTES], "big")
        return Offset(self._start + stored - 1) if stored else Offset(-1)

    def _find(self, digest: bytes) -> int:
        """The place of the digest's slot, or of the free one where it belongs."""
        slots = self._slots
        at = int.from_bytes(digest[:8], "big") % self._slot_count * _SLOT_BYTES
        while True:
            if slots[at : at + _HASH_BYTES] == digest or not any(slots[at + _HASH_BYTES : at + _SLOT_BYTES]):
                return at
            at += _SLOT_BYTES
            if at == len(slots):
                at = 0
