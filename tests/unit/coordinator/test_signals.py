"""Ctrl-C that comes twice while a command runs: soon after, as timeout(1) sends it, or later, as a person does."""

import subprocess
import sys

import pytest

# It gets Ctrl-C in the middle of its work, and again as it begins to end.
COMMAND = """
import asyncio, signal, sys
from smq.coordinator import signals
from smq.coordinator.cli.common import run

async def work():
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(1)
        print("ended in order")

signals.SAME_SIGNAL_S = float(sys.argv[1])
try:
    run(work(), "")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("same_signal_s", "says"),
    [("60", "ended in order\ninterrupted\n"), ("0", "interrupted\n")],
    ids=["the-same-wish", "does-not-want-to-wait"],
)
def test_the_second_ctrl_c_ends_a_command_only_if_it_comes_later(same_signal_s: str, says: str) -> None:
    command = [sys.executable, "-c", COMMAND, same_signal_s]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, says, "")
