"""How a person writes a time (an age, or a date and time) and a duration, the same in the command line and the console.

Owns the format. It knows no option and no form. `cli.moments` and the console import it.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_SPAN: Final = re.compile(r"([0-9]{1,9})(ms|[smhdw])")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_MS_DIGITS_MIN: Final = 11  # fewer would be a year, or seconds by mistake
_MS_MAX: Final = 2**63 - 1


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
