"""A process that must end does so, and one that goes on does so, whatever becomes of its log."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smq.coordinator.user_errors import EXIT_FATAL

DIES = """
import os, sys
from smq.coordinator import limits
from smq.coordinator.server.process import configure_logs
from smq.coordinator.server.composition import die
configure_logs(1)
limits.LAST_WORDS_S = 0.2
if sys.argv[1:]:
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, bytes(4096))
    except BlockingIOError:
        os.set_blocking(2, True)
die(ValueError("broken"))
"""

LOGS = """
import structlog
from smq.coordinator.server.process import configure_logs
configure_logs(1)
for _ in range(1_000):
    structlog.get_logger().info("a line", text="x" * 100)
print("went on")
"""


def run(script: str, stderr: int, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    )


def test_a_fatal_error_ends_the_process_though_its_log_is_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        assert run(DIES, full.fileno()).returncode == EXIT_FATAL


def test_a_fatal_error_ends_the_process_though_its_log_takes_nothing() -> None:
    """A pipe without a reader stands for a disk that hangs."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        try:
            assert run(DIES, reader.stdin.fileno(), "fill").returncode == EXIT_FATAL
        finally:
            reader.kill()


NO_THREADS = """
import threading
def refuse(*_):
    raise RuntimeError("can't start new thread")
threading._start_new_thread = refuse
"""


@pytest.mark.parametrize("before", ["", NO_THREADS])
def test_a_fatal_error_is_logged_also_without_another_thread(before: str) -> None:
    ended = run(before + DIES, subprocess.PIPE)
    assert ended.returncode == EXIT_FATAL
    assert "ValueError: broken" in ended.stderr


def test_a_line_that_cannot_be_written_ends_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        ended = run(LOGS, full.fileno())
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


ONE_LINE = """
import structlog
from smq.coordinator.server.process import configure_logs
configure_logs(7)
structlog.get_logger().info("a line", size=3)
"""


def test_a_log_is_for_a_person_on_a_terminal_and_json_otherwise() -> None:
    leader, follower = os.openpty()
    try:
        assert run(ONE_LINE, follower).returncode == 0
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(leader, 4096).decode())
    finally:
        os.close(leader)
        os.close(follower)
    assert re.match(r"20\S+ \[info +\] a line +node=7 size=3", shown), shown
    assert json.loads(run(ONE_LINE, subprocess.PIPE).stderr)["size"] == 3
