"""When a signal means "end in order", and when it means "now".

Owns that difference; the caller owns what is done. A signal is a callback of the loop, never an exception in the middle
of one, as asyncio's own KeyboardInterrupt at a second Ctrl-C is: the wake-up that was on its way is lost with it, and
`asyncio.run` then waits for ever for the task that it was for.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

SAME_SIGNAL_S: Final = 0.5  # timeout(1), `uv run` and others signal the process, and its process group once more


def listen(
    numbers: tuple[signal.Signals, ...],
    end_in_order: Callable[[], object],
    end_now: Callable[[signal.Signals], object],
) -> None:
    """For the running loop, until it closes: the first of these signals ends in order. What follows soon is the same
    wish, and changes nothing. A later one ends now: a person does not want to wait."""
    loop = asyncio.get_running_loop()
    came_at: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal came_at
        if came_at is None:
            came_at = loop.time()
            end_in_order()
        elif loop.time() - came_at > SAME_SIGNAL_S:
            end_now(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
