"""Long answers built in parts, so that other tasks get the loop in between.

Owns the length of a part. The parts of one answer may show different moments: only answers that promise no consistent
snapshot may use it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

ITEMS_PER_TURN: Final = 250  # about 5 us each


class Turns:
    """Of one answer; counts over all its lists."""

    def __init__(self) -> None:
        self._count = 0

    async def over(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Each item, with a pause for other tasks now and then."""
        for item in items:
            yield item
            self._count += 1
            if self._count % ITEMS_PER_TURN == 0:
                await asyncio.sleep(0)
