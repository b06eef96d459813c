"""`async with` for clients: starts and closes them.

Owns one rule: a client that fails to start is closed before its error propagates. Only this package imports it.
"""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Lifecycle")


class Lifecycle(ABC):
    """Base of the asynchronous clients."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self: C) -> C:
        try:
            await self.start()
        except BaseException:  # even a cancelled start must leave no channel open
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
