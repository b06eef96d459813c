"""The types of options that are a time or a duration; `operators.formats` has their format.

Owns their names in the help. Commands import it.
"""

from typing import Final

import click

from smq.coordinator.operators.formats import moment_ms, span_ms


class Moment(click.ParamType):  # type: ignore[type-arg] # generic in the newest click alone
    """Milliseconds since 1970."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return moment_ms(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


class Span(click.ParamType):  # type: ignore[type-arg] # as above
    """Milliseconds."""

    name = "DURATION"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return span_ms(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


MOMENT: Final = Moment()
SPAN: Final = Span()
