"""Records for the connector's tests over a fake cluster."""

from smq.records import NewRecord


def records(count: int, *, first: int = 0, value_bytes: int = 20) -> list[NewRecord]:
    """`count` records whose values begin with their numbers."""
    return [
        NewRecord(key=b"k%d" % (i % 7), value=(b"%d:" % i).ljust(value_bytes, b"."), timestamp_ms=1_700_000_000_000 + i)
        for i in range(first, first + count)
    ]
