"""When a signal means "end in order", and when it means "now".

Owns that difference; the caller owns what is done. A signal that begins an end in order must never be an exception in
the middle of a callback of the loop, as asyncio's own KeyboardInterrupt at a second Ctrl-C is: the wake-up that was on
its way is lost with it, and `asyncio.run` then waits for ever for the task that it was for.
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SAME_SIGNAL_S: Final = 0.5  # timeout(1), `uv run` and others signal the process, and its process group once more

SignalFn = Callable[[signal.Signals], object]


@contextmanager
def handled(numbers: Iterable[signal.Signals], end_in_order: SignalFn, end_now: SignalFn) -> Iterator[None]:
    """Within the block the first of these signals ends in order. What follows soon, of any of them, is the same wish,
    and changes nothing. A later one ends now: a person does not want to wait. Both functions are called in the main
    thread, between any two steps of it. Only that thread may enter."""
    came_at: float | None = None

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal came_at
        if came_at is None:
            came_at = time.monotonic()
            end_in_order(signal.Signals(number))
        elif time.monotonic() - came_at > SAME_SIGNAL_S:
            end_now(signal.Signals(number))

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
