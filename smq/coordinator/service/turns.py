"""Long answers made a part at a time, so that others have the loop in between.

Owns how long a part is. What an answer tells may so be of several moments: only for those that promise no single one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

ITEMS_A_TURN: Final = 250  # of some 5 us each


class Turns:
    """Of one answer, over all its lists."""

    def __init__(self) -> None:
        self._count = 0

    async def over(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Each item, and now and then a turn for others."""
        for item in items:
            yield item
            self._count += 1
            if self._count % ITEMS_A_TURN == 0:
                await asyncio.sleep(0)
