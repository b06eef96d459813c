"""How the command line writes a time (an age, or a date and time) and a duration.

Owns the types of such options. Commands import it.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import click

_AGE: Final = re.compile(r"([0-9]{1,9})(ms|[smhdw])")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class Moment(click.ParamType):  # type: ignore[type-arg] # generic in the newest click alone
    """Milliseconds since 1970, of 30m, 12h or 7d (ago), of 2026-01-31 or 2026-01-31T12:00Z (UTC unless it names
    another zone), or of a whole number of milliseconds."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        try:
            if (age := _AGE.fullmatch(text)) is not None:
                moment = datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
            elif text.isdecimal() and len(text) >= 11:  # fewer digits would be a year, or seconds by mistake
                return int(text)
            else:
                moment = datetime.fromisoformat(text)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            found = int(moment.timestamp() * 1_000)
        except (ValueError, OverflowError):
            found = -1
        if found < 0:
            self.fail(f"{text!r} is no time: write an age (30m, 12h, 7d) or 2026-01-31T12:00Z", param, ctx)
        return found


class Span(click.ParamType):  # type: ignore[type-arg] # as above
    """Milliseconds, of 500ms, 30s, 5m or 12h."""

    name = "DURATION"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _AGE.fullmatch(str(value))
        if found is None or not int(found[1]):
            self.fail(f"{str(value)!r} is no duration: write a number and a unit (500ms, 30s, 5m)", param, ctx)
        return int(found[1]) * _SECONDS[found[2]] * 1_000


MOMENT: Final = Moment()
SPAN: Final = Span()
