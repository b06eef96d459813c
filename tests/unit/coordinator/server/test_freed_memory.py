"""Blocks of the size of a batch come from memory that the process has kept, and the environment has the last word."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes
from smq.coordinator.server.process import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd us fs uord ford keep".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
took = keep_freed_memory()
before = libc.mallinfo2()
block = bytes(1 << 20)
mapped = libc.mallinfo2().hblks - before.hblks
del block
kept = libc.mallinfo2().ford - before.ford
print(took, mapped, kept >> 19)
"""


def run(**environment: str) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={name: value for name, value in os.environ.items() if "MALLOC" not in name} | environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_a_freed_batch_stays_with_the_process() -> None:
    took, mapped, kept = run()
    assert (took, mapped) == ("True", "0")
    assert int(kept) >= 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_another_setting_of_the_allocator_does_not_matter() -> None:
    assert run(MALLOC_ARENA_MAX="4")[:2] == ["True", "0"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(
    "environment", [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]
)
def test_what_the_environment_sets_stays(environment: dict[str, str]) -> None:
    assert run(**environment) == ["False", "1", "0"]
