"""The keys of a run with compaction: which key a value has, and which values are tombstones.

Owns the rule, so that the clients that send and the judges that read agree without a message. Any part may import it.
"""

from typing import Final

GONE: Final = -2  # in the place of a record that compaction has removed, in what a client read
VALUE_HEADER: Final = "v"  # of a tombstone: it has no value of its own
_MIX: Final = 2_654_435_761  # Knuth's multiplier: neighbouring values get different keys
_TOMBSTONES: Final = 6  # one in so many values


def key_of(value: int, keys: int) -> int:
    return (value * _MIX >> 7) % keys


def is_tombstone(value: int) -> bool:
    return (value * _MIX >> 15) % _TOMBSTONES == 0
