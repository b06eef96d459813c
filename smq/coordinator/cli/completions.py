"""What a shell completes beside options: names of topics and groups, as the cluster has them.

Owns the types of such arguments. A cluster that does not answer soon completes nothing: a Tab must never hang or print
an error. Commands import it.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

from smq.coordinator.cli.connect import BOOTSTRAP_DEFAULT, BOOTSTRAP_VARIABLE

if TYPE_CHECKING:
    from smq.clients import Admin

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
