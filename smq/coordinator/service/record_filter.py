"""Which records a reader wants: by key, headers and time.

Owns the conditions, and what a batch's header says of all its records. Pure. The ports translate their requests to it,
and `smq consume` its options.
"""

from dataclasses import dataclass
from typing import Protocol

from smq.records import BatchHeader, Headers


class Filtered(Protocol):
    """A record, as the node or a client has decoded it."""

    @property
    def timestamp_ms(self) -> int: ...

    @property
    def key(self) -> bytes | None: ...

    @property
    def headers(self) -> Headers: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Every condition that is given must hold. A header with value None may have any value; of one that is named
    twice, a record must have both values."""

    key: bytes | None = None
    key_prefix: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    from_ms: int | None = None  # inclusive
    until_ms: int | None = None  # exclusive

    def may_hold(self, header: BatchHeader) -> bool:
        """False if no record of the batch passes. Records without a time have -1, and so may their batch."""
        return self.from_ms is None or header.max_timestamp >= self.from_ms

    def passes(self, record: Filtered) -> bool:
        if self.key is not None and record.key != self.key:
            return False
        if self.key_prefix is not None and not (record.key or b"").startswith(self.key_prefix):
            return False
        if self.from_ms is not None and record.timestamp_ms < self.from_ms:
            return False
        if self.until_ms is not None and record.timestamp_ms >= self.until_ms:
            return False
        return all(_has(record, name, value) for name, value in self.headers)


def _has(record: Filtered, name: str, value: bytes | None) -> bool:
    return any(key == name and (value is None or found == value) for key, found in record.headers)
