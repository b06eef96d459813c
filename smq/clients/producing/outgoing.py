"""A record on its way in: its fields, and the checks of everything that a caller gives to a producer.

Owns the record that interceptors see. It must never encode or route one. The producers and `interceptors` import it;
users import ProducerRecord through `smq.clients`.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from smq.clients.arguments import INT32_MAX, Instant, check_int, check_name, instant_ms, invalid, shown
from smq.records import Headers

_BYTES_LIKE: Final = frozenset({bytes, bytearray, memoryview, type(None)})


class ProducerRecord(NamedTuple):
    """A record before it is sent. `partition`: None if its key or the producer chooses it. `timestamp_ms`: its create
    time. `record._replace(value=...)` gives a changed copy."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    partition: int | None
    timestamp_ms: int


def checked_record(
    topic: object, value: object, key: object, headers: Headers, partition: object, timestamp_ms: object
) -> tuple[int, list[tuple[str, bytes | None]], int]:
    """(create time in ms, the headers as a list, size in bytes). INVALID_REQUEST names the argument."""
    if type(topic) is not str or not topic or not topic.isascii():
        check_name("topic", topic)
    if type(value) not in _BYTES_LIKE:
        raise invalid(f"value must be bytes or None, not {shown(value)}")
    if type(key) not in _BYTES_LIKE:
        raise invalid(f"key must be bytes or None, not {shown(key)}")
    if partition is not None:
        check_int("partition", partition, 0, INT32_MAX)
    when = int(time.time() * 1000) if timestamp_ms is None else instant_ms("timestamp_ms", timestamp_ms)
    size = len(value or b"") + len(key or b"")  # type: ignore[arg-type] # checked above
    return when, _listed_headers(headers) if headers else [], size


def _listed_headers(headers: object) -> list[tuple[str, bytes | None]]:
    """A copy that can be read twice, unlike a generator."""
    found: list[Any] = list(headers) if isinstance(headers, Iterable) else [headers]
    for pair in found:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise invalid(f"headers must be a list of (str, bytes or None) pairs, not {shown(headers)}")
        if type(pair[1]) not in _BYTES_LIKE:
            raise invalid(f"headers: the value of {pair[0]!r} must be bytes or None, not {shown(pair[1])}")
    return found


def checked_times(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    times: Instant | Sequence[Instant] | None,
) -> int | Sequence[int]:
    """All or nothing: finds a record that cannot be encoded before any is buffered. Returns the times in ms."""
    for name, given in (("values", values), ("keys", keys)):
        if given is not None:
            _check_column(name, given)
    if not values:
        raise invalid("values is empty: send_many needs at least one record")
    if keys is not None and len(keys) != len(values):
        raise invalid(f"keys has {len(keys)} items, and values {len(values)}")
    if times is None:
        return int(time.time() * 1000)
    if isinstance(times, str | bytes) or not isinstance(times, Sequence):
        return instant_ms("timestamp_ms", times)
    if len(times) != len(values):
        raise invalid(f"timestamp_ms has {len(times)} items, and values {len(values)}")
    return [instant_ms("timestamp_ms", each) for each in times]


def _check_column(name: str, given: object) -> None:
    if isinstance(given, str | bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        raise invalid(f"{name} must be a list of bytes or None, not {shown(given)}")
    if not set(map(type, given)) <= _BYTES_LIKE:
        wrong = next((i, item) for i, item in enumerate(given) if type(item) not in _BYTES_LIKE)
        raise invalid(f"{name}[{wrong[0]}] must be bytes or None, not {shown(wrong[1])}")
