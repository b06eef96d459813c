"""What a command waits for, as lines on standard error: nothing while there is progress, a line within a second
otherwise.

Owns when a line is due and its wording. It must never measure time or print by itself. `cli.produce` imports it.
"""

from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.7  # with the time between two looks, within a second; a healthy cluster answers in milliseconds
AGAIN_S: Final = 5.0  # often enough to show that the command lives, seldom enough to be read


class Waiting:
    """Call `look` several times per second. `say` gets the lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._done = 0
        self._since_s: float | None = None  # when the present wait began
        self._said_s: float | None = None  # its last line

    def look(self, what: str | None, done: int, now_s: float) -> None:
        """`what` is waited for, None for nothing; `done` grows with each progress."""
        if what is None or self._since_s is None or done != self._done:
            self._over(now_s)
            self._done, self._said_s = done, None
            self._since_s = None if what is None else now_s
            return
        waited_s = now_s - self._since_s
        if self._said_s is None and waited_s >= FIRST_S:
            self._say(f"waiting for {what}")
        elif self._said_s is not None and now_s - self._said_s >= AGAIN_S:
            self._say(f"waiting for {what}, for {waited_s:.0f} s so far")
        else:
            return
        self._said_s = now_s

    def _over(self, now_s: float) -> None:
        if self._said_s is not None and self._since_s is not None:
            self._say(f"going on after {now_s - self._since_s:.1f} s")
