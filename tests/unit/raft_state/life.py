"""The life of a cluster that transcripts/level_1.txt tells: it uses every command and fills every part of the state.

Run as a program it prints the digest of the end: that of a fresh process, under whatever PYTHONHASHSEED.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from smq.raft_state import commands as commands_module
from smq.raft_state import ids, limits, replies
from smq.raft_state.commands import Command, Coordinated
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import LogIndex
from smq.raft_state.machine import Machine
from tests.unit.raft_state import support
from tests.unit.raft_state.support import proposed

DIRECTORY: Final = Path(__file__).parents[2] / "transcripts"
_MODULES: Final = (ids, limits, commands_module, replies, support)
_NAMES: Final[dict[str, Any]] = {
    "replace": replace,
    "ErrorCode": ErrorCode,
    **{name: value for module in _MODULES for name, value in vars(module).items()},
}


def value_of(text: str) -> Any:
    """A command or a reply, as a line of a transcript has it."""
    return eval(text, dict(_NAMES))  # noqa: S307 - these are the repository's own files


def transcript(name: str) -> str:
    return (DIRECTORY / f"{name}.txt").read_text()


def commands_of(text: str) -> list[Command]:
    """What a transcript applies, in order."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("> ") and "(" in line]
    return [value_of(line) for line in lines if not line.startswith("bytes ")]


def bytes_of(text: str) -> Iterator[tuple[Any, bytes]]:
    """The values that a transcript shows as bytes, in order."""
    lines = text.splitlines()
    for line, encoded in pairwise(lines):
        if line.startswith("> bytes "):
            yield value_of(line.removeprefix("> bytes ")), bytes.fromhex(encoded)


def snapshot_of(text: str) -> bytes:
    """The snapshot at the end of a transcript."""
    _, _, after = text.rpartition("> snapshot\n")
    return bytes.fromhex(after[: after.index("> ")])


@cache
def commands() -> tuple[Command, ...]:
    """The life, in order."""
    return tuple(commands_of(transcript("level_1")))


def run(machine: Machine, steps: Sequence[Command], first_index: int = 1) -> None:
    for index, command in enumerate(steps, first_index):
        machine.apply(
            LogIndex(index), proposed(machine.state, command) if isinstance(command, Coordinated) else command
        )


def end_of_life() -> Machine:
    """A machine after the whole life."""
    machine = Machine()
    run(machine, commands())
    return machine


if __name__ == "__main__":
    sys.stdout.write(end_of_life().digest())
