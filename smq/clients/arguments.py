"""Checks of what callers pass: one way for all clients, at the call, and with the argument's name in the error.

Owns the rules for values that no request message checks by itself: options of constructors, records, times, settings.
(`errors.build` checks what goes into a message.) Every check raises INVALID_REQUEST. It must never convert what is
wrong into something that is not. Only `smq.clients` imports it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, SmqError

Duration: TypeAlias = float | timedelta  # milliseconds, if it is a number
Instant: TypeAlias = int | datetime  # milliseconds since 1970, if it is a number

INT32_MAX: Final = (1 << 31) - 1
INT64_MAX: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def invalid(message: str) -> SmqError:
    return SmqError(ErrorCode.INVALID_REQUEST, message)


def shown(value: object) -> str:
    """The value in an error message: short, and with its type unless that is plain."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if isinstance(value, str | bytes | int | float | None) else f"{text} ({type(value).__name__})"


def check_int(argument: str, value: object, lo: int, hi: int = INT64_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{argument} must be a whole number, not {shown(value)}")
    if not lo <= value <= hi:
        raise invalid(f"{argument} {value} is out of range: {lo} to {hi}")


def check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{argument} must be True or False, not {shown(value)}")


def check_callback(argument: str, value: object) -> None:
    """A function, or None."""
    if value is not None and not callable(value):
        raise invalid(f"{argument} must be a function, not {shown(value)}")


def check_choice(argument: str, value: object, allowed: Collection[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise invalid(f"{argument} must be one of {', '.join(allowed)}, not {shown(value)}")


def check_name(argument: str, value: object) -> None:
    """A topic's or a group's name: text that a message can hold, and not empty. The server has the further rules."""
    if not isinstance(value, str):
        raise invalid(f"{argument} must be a str, not {shown(value)}")
    if not value:
        raise invalid(f"{argument} must not be empty")
    try:
        value.encode()
    except UnicodeError as e:
        raise invalid(f"{argument} {value!r} is no text in UTF-8") from e


def check_kind(argument: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise invalid(f"{argument} must be a {kind.__name__}, not {shown(value)}")


def seconds(argument: str, value: object) -> float | None:
    """How long to wait, as in the standard library: a number of seconds, or a timedelta. None: without a limit."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
        raise invalid(f"{argument} must be a number of seconds, a timedelta or None, not {shown(value)}")
    return found


def milliseconds(argument: str, value: object, *, lo: float = 1.0) -> float:
    """A duration: a number of milliseconds, or a timedelta. At least `lo`, at most 24 days."""
    found = value / _MS if isinstance(value, timedelta) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise invalid(f"{argument} must be a number of milliseconds or a timedelta, not {shown(value)}")
    if not lo <= found <= INT32_MAX:
        raise invalid(f"{argument} must be {lo:g} to {INT32_MAX} milliseconds, not {shown(value)}")
    return found


def instant_ms(argument: str, value: object) -> int:
    """A moment: whole milliseconds since 1970, or a datetime with a time zone."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise invalid(f"{argument} {value.isoformat()} has no time zone: add tzinfo=UTC, or .astimezone()")
        value = (value - _EPOCH) // _MS
    return _since_1970(argument, value, "milliseconds")


def instant_ns(argument: str, value: object) -> int:
    """As `instant_ms`, in nanoseconds."""
    if isinstance(value, datetime):
        return instant_ms(argument, value) * 1_000_000 + value.microsecond % 1_000 * 1_000
    return _since_1970(argument, value, "nanoseconds")


def _since_1970(argument: str, value: object, unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{argument} must be whole {unit} since 1970 or a datetime, not {shown(value)}")
    if not 0 <= value <= INT64_MAX:
        raise invalid(f"{argument} {value} is out of range: 0 to {INT64_MAX}")
    return value


def settings(argument: str, value: object) -> dict[str, str]:
    """Configuration as a dict of str to str; None is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"{argument} must be a mapping of str to str, not {shown(value)}")
    for key, given in value.items():
        if not isinstance(key, str):
            raise invalid(f"{argument}: the key {shown(key)} must be a str")
        if not isinstance(given, str):
            raise invalid(f"{argument}: the value of {key!r} must be a str, not {shown(given)}: write {str(given)!r}")
    return dict(value)


def names(argument: str, value: object) -> list[str]:
    """Several names. A single str is refused, as its letters would be taken for names."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise invalid(f"{argument} must be a list of names, not {shown(value)}")
    found = list(value)
    for name in found:
        check_name(argument, name)
    return found


def partitions_of(argument: str, value: object) -> list[tuple[str, int]]:
    """Several (topic, partition) pairs."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise invalid(f"{argument} must be a list of (topic, partition), not {shown(value)}")
    found = list(value)
    for each in found:
        check_partition(argument, each)
    return found


def check_partition(argument: str, value: object) -> None:
    """(topic, partition)."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise invalid(f"{argument}: write (topic, partition), not {shown(value)}")
    check_name(f"{argument}: topic", value[0])
    check_int(f"{argument}: partition", value[1], 0, INT32_MAX)


def check_place(topic: object, partition: object) -> None:
    """A partition that is given as two arguments."""
    check_name("topic", topic)
    check_int("partition", partition, 0, INT32_MAX)
