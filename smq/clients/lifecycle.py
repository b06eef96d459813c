"""`async with` for clients that are started and closed.

Owns what happens between: one that fails to start is closed before its error goes on. Only this package imports it.
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
        except BaseException:  # a cancelled start, too, leaves no channel open; the error goes on
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
