"""Warnings that strangers can cause: so many per second, whatever they send.

Owns the count of those that are not logged, which the next one has. A log is written on the event loop, and its disk
has an end. The ports import it.
"""

import time
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_SECOND_S: Final = 1.0


class RareWarnings:
    """Of one kind. To be called from one thread."""

    def __init__(self, per_second_max: int) -> None:
        self._max = per_second_max
        self._since_s = -_SECOND_S
        self._logged = 0
        self._unlogged = 0

    def warn(self, event: str, **fields: object) -> None:
        now = time.monotonic()
        if now - self._since_s >= _SECOND_S:
            self._since_s, self._logged = now, 0
        if self._logged >= self._max:
            self._unlogged += 1
            return
        self._logged += 1
        log.warning(event, **fields, not_logged=self._unlogged)
        self._unlogged = 0
