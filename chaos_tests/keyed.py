"""The keys of a run with compaction: which key a value has, which values are tombstones, and what a batch still shows.

Owns the rule, so that the clients that send and the judges that read agree without a message. Any part may import it.
"""

from collections.abc import Iterable
from typing import Final

from smq.records import BatchHeader, Buffer, NewRecord, decode_batch

GONE: Final = -2  # in the place of a record that compaction has removed, in what a client read
VALUE_HEADER: Final = "v"  # of a tombstone: it has no value of its own
_MIX: Final = 2_654_435_761  # Knuth's multiplier: neighbouring values get different keys
_TOMBSTONES: Final = 6  # one in so many values


def key_of(value: int, keys: int) -> int:
    return (value * _MIX >> 7) % keys


def is_tombstone(value: int) -> bool:
    return (value * _MIX >> 15) % _TOMBSTONES == 0


def record_of(value: int, keys: int, timestamp_ms: int) -> NewRecord:
    """A record with this value; if `keys` is not 0 it has a key, and may be a tombstone."""
    if not keys:
        return NewRecord(None, b"%d" % value, timestamp_ms)
    key = b"key %d" % key_of(value, keys)
    if is_tombstone(value):
        return NewRecord(key, None, timestamp_ms, ((VALUE_HEADER, b"%d" % value),))
    return NewRecord(key, b"%d" % value, timestamp_ms)


def value_of(value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Of a record with these, whichever client has read it."""
    return int((dict(headers)[VALUE_HEADER] if value is None else value) or b"-1")


def values_of(batch: Buffer, header: BatchHeader) -> list[int]:
    """One for each of the batch's offsets."""
    values = [GONE] * (header.last_offset_delta + 1)
    for record in decode_batch(batch) if header.count else ():
        values[record.offset - header.base_offset] = value_of(record.value, record.headers)
    return values
