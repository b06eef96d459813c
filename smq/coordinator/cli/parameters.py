"""The types of arguments and options: names of topics and groups, which a shell completes, times and durations.

Owns their names in the help, and what a shell completes. A cluster that does not answer soon completes nothing: a Tab
must never hang or print an error. `operators.formats` has the format of times. Commands import it.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

from smq.coordinator.cli.connect import BOOTSTRAP_DEFAULT
from smq.coordinator.cli.profile import BOOTSTRAP_VARIABLE

if TYPE_CHECKING:
    from smq.clients import Admin


from smq.coordinator.operators.formats import moment_ms, span_ms

_PATIENCE_MS: Final = 1_000.0


class _Named(click.ParamType, ABC):  # type: ignore[type-arg] # generic in the newest click alone
    name = "name"

    @abstractmethod
    async def names(self, admin: "Admin") -> list[str]:
        """All that may stand there."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from smq.clients import Admin, SmqError

        bootstrap = ctx.params.get("bootstrap") or os.environ.get(BOOTSTRAP_VARIABLE) or BOOTSTRAP_DEFAULT

        async def ask() -> list[str]:
            async with Admin(bootstrap, timeout_ms=_PATIENCE_MS, connect_timeout_ms=_PATIENCE_MS) as admin:
                return await self.names(admin)

        try:
            found = asyncio.run(ask())
        except (SmqError, OSError):
            return []
        return [CompletionItem(name) for name in found if name.startswith(incomplete)]


class _Topic(_Named):
    name = "topic"

    async def names(self, admin: "Admin") -> list[str]:
        cluster = await admin.describe_cluster(is_linearizable=False)
        return sorted(t.name for t in cluster.topics)


class _Group(_Named):
    name = "group"

    async def names(self, admin: "Admin") -> list[str]:
        return [group.name for group in await admin.list_groups()]


TOPIC: Final = _Topic()
GROUP: Final = _Group()


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
