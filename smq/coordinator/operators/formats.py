"""How a person reads sizes, ages and totals of lag, and writes times: alike in the command line and in the console.

Owns their form: what is not known is a dash or "or more", never zero. It knows no option and no page. Pure. `cli` and
the console import it.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from smq.clients.lag_totals import LagTotal, Total

_SPAN: Final = re.compile(r"([0-9]{1,9})(ms|[smhdw])")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_MS_DIGITS_MIN: Final = 11  # fewer would be a year, or seconds by mistake
_MS_MAX: Final = 2**63 - 1


def number_text(value: int | None) -> str:
    """1,234; a dash if it is not known."""
    return f"{value:,}" if value is not None else "-"


def size_text(size: int | None) -> str:
    """12 B, 3.4 KiB; a dash if it is not known."""
    if size is None:
        return "-"
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def age_text(ms: int | None) -> str:
    """0 s, 12 s, 3 m 20 s, 5 h 10 m, 30 d 2 h; a dash if it is not known."""
    if ms is None:
        return "-"
    seconds = ms // 1_000
    for unit, smaller, size, part in (("d", "h", 86_400, 3_600), ("h", "m", 3_600, 60), ("m", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller}"
    return f"{seconds} s" if seconds or not ms else f"{ms} ms"


def offsets_text(lag: int | None, committed: int | None, end: int | None) -> str:
    """The lag of one partition. A commit beyond the end, which no record has reached yet, is no lag of zero."""
    if committed is not None and end is not None and committed > end:
        return f"{committed - end:,} beyond the end"
    return number_text(lag)


def lag_texts(total: LagTotal) -> tuple[str, str, str, str]:
    """Offsets, records, bytes and time. "12 or more" if a part is not known."""
    return (
        _total_text(total.offsets, number_text),
        _total_text(total.records, number_text),
        _total_text(total.size_bytes, size_text),
        _total_text(total.age_ms, age_text),
    )


def _total_text(total: Total, text: Callable[[int | None], str]) -> str:
    if total.is_known:
        return text(total.at_least)
    return f"{text(total.at_least)} or more" if total.at_least else text(None)


# ------------------------------------------------------------------------------------------- times as they are written
def moment_ms(text: str) -> int:
    """Milliseconds since 1970, of 30m, 12h or 7d (ago), of 2026-01-31 or 2026-01-31T12:00Z (UTC unless it names
    another zone), or of a whole number of milliseconds. ValueError says what to write instead."""
    try:
        if (age := _SPAN.fullmatch(text)) is not None:
            moment = datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        elif text.isascii() and text.isdecimal() and len(text) >= _MS_DIGITS_MIN:
            return _checked(int(text))
        else:
            moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return _checked(int(moment.timestamp() * 1_000))
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:40]!r} is no time: write an age (30m, 12h, 7d) or 2026-01-31T12:00Z") from None


def _checked(ms: int) -> int:
    if not 0 <= ms <= _MS_MAX:
        raise ValueError("before 1970, or too late")
    return ms


def span_ms(text: str) -> float:
    """Milliseconds, of 500ms, 30s, 5m or 12h. ValueError says what to write instead."""
    found = _SPAN.fullmatch(text)
    if found is None or not int(found[1]):
        raise ValueError(f"{text[:40]!r} is no duration: write a number and a unit (500ms, 30s, 5m)")
    return int(found[1]) * _SECONDS[found[2]] * 1_000
