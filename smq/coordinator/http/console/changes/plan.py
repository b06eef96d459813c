"""A change as a page shows it, and what a kind of change consists of.

Owns the shape of both. The modules of changes and `changes.pages` import it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from smq.clients import Admin
from smq.coordinator.http.console.markup import Content, address, link, tag, void
from smq.coordinator.http.console.refusals import BadRequest

ROWS_MAX: Final = (
    1_000  # partitions of one change: its page and its form stay small. The command line has no such bound
)

Change: TypeAlias = Any  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`content` is the dry run; `change` is what the confirmation makes, exactly, or None if there is nothing to do."""

    content: Sequence[Content]
    change: Change | None
    button: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One kind of change. `plan` shows it for the object of that name; `make` makes it, and returns what has happened,
    as the time line has it."""

    section: str  # of the console: the object's page is at SECTION/NAME
    verb: str  # the last part of the address
    title: str
    plan: Callable[[Admin, str, Mapping[str, str]], Awaitable[Plan]]
    make: Callable[[Admin, str, Change], Awaitable[str]]
    is_typed: bool = False  # the name has to be typed, since nothing brings the object back
    back: Callable[[str], str] | None = None  # the page to return to, if it is not the object's own

    @property
    def path(self) -> str:
        return f"/console/{self.section}/{{name}}/{self.verb}"

    def link(self, title: str, name: str) -> Content:
        return link(title, self.section, name, self.verb)

    def form(self, name: str, *fields: Content) -> Content:
        """Asks for the plan."""
        target = address(self.section, name, self.verb)
        button = tag("button", "Show what would change", type="submit")
        return tag("form", *fields, button, method="get", action=target, aria_label=self.title)


def field(title: str, name: str, value: str = "") -> Content:
    return tag("label", title, void("input", type="text", name=name, value=value))


def check_rows(count: int) -> None:
    if count > ROWS_MAX:
        raise BadRequest(f"{count:,} partitions would change: a page shows {ROWS_MAX:,}. Use the command line")
