"""Ctrl-C that comes twice while a command runs: soon after, as timeout(1) sends it, or later, as a person does."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from smq.coordinator.server import signals

# It gets Ctrl-C in the middle of its work, and again as it begins to end.
COMMAND = """
import asyncio, contextlib, signal, sys
from smq.coordinator.server import signals
from smq.coordinator.cli.common import run

async def work():
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    try:
        await asyncio.sleep(0.2 if is_ignored else 60)
    finally:
        try:
            signal.raise_signal(signal.SIGINT)
        except SystemExit:
            if sys.argv[2:] != ["holds on"]:
                raise
            with contextlib.suppress(SystemExit):
                signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(1)
        print("ended in order")

signals.SAME_SIGNAL_S = float(sys.argv[1])
is_ignored = sys.argv[2:] == ["ignored"]
if is_ignored:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    run(work(), "")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("same_signal_s", "ends"),
    [("60", (0, "ended in order\ninterrupted\n", "")), ("0", (130, "", ""))],
    ids=["the-same-wish", "does-not-want-to-wait"],
)
def test_the_second_ctrl_c_ends_a_command_only_if_it_comes_later(
    same_signal_s: str, ends: tuple[int, str, str]
) -> None:
    command = [sys.executable, "-c", COMMAND, same_signal_s]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == ends


def test_the_third_ctrl_c_ends_a_command_that_does_not_let_go() -> None:
    """Output that was blocked on a full pipe took nine of them."""
    command = [sys.executable, "-c", COMMAND, "0", "holds on"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_signal_counts_from_when_it_comes_also_while_the_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that began its end, and was then busy for longer, took the second one of timeout(1) for a later one."""
    seen: list[str] = []
    monkeypatch.setattr(signals, "SAME_SIGNAL_S", 0.2)

    async def busy() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(signal.raise_signal, signal.SIGUSR1)
        loop.call_soon(signal.raise_signal, signal.SIGUSR2)
        loop.call_soon(time.sleep, 0.3)
        await asyncio.sleep(0.4)
        assert seen == ["in order"]
        signal.raise_signal(signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    with signals.handled(numbers, lambda _: seen.append("in order"), lambda number: seen.append(number.name)):
        asyncio.run(busy())
    assert seen == ["in order", "SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_job_of_a_script_that_ignores_ctrl_c_goes_on() -> None:
    command = [sys.executable, "-c", COMMAND, "60", "ignored"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended in order\n", "")
