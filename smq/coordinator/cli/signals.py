"""How Ctrl-C and SIGTERM end a command that runs a coroutine: in order, and without waiting for ever.

Owns what becomes of a signal while the loop runs. It must never be an exception in the middle of a callback, as
asyncio's own KeyboardInterrupt at a second Ctrl-C is: the wake-up that was on its way is lost with it, and
`asyncio.run` then waits for ever for the task that it was for.
"""

import asyncio
import signal
from typing import Final

SAME_SIGNAL_S: Final = 0.5  # timeout(1) sends a signal to the command, and another one to its process group


class OrderlyEnd:
    """The first signal cancels the task that listens. What follows soon is the same wish, and does not cut its end
    short. A later one does: a person does not want to wait."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._came_at: float | None = None

    @property
    def has_come(self) -> bool:
        return self._came_at is not None

    def listen(self) -> None:
        """From now on until the loop closes, for the task that calls this."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(self._number, self._on_signal, loop, task)

    def _on_signal(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[object]) -> None:
        if self._came_at is None:
            self._came_at = loop.time()
            task.cancel()
        elif loop.time() - self._came_at > SAME_SIGNAL_S:
            raise KeyboardInterrupt if self._number is signal.SIGINT else SystemExit(128 + self._number)
