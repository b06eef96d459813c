"""What a frame between two nodes costs its sender, counted: writes, system calls and copies."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.replication.net.frames import FrameKind, frame_header
from smq.replication.net.peer_connection import Connection
from smq.replication.net.tcp import TcpSettings
from smq.replication.ports import Buffer
from tests.unit.replication.net.test_tcp import DATA, ONE, TWO, Pair, paired, run

CALLS = Path("/proc/thread-self/io")
FRAMES = 100


class Wire:
    """The socket of a connection: keeps what each write was given."""

    def __init__(self) -> None:
        self.writes: list[list[Buffer]] = []

    def get_extra_info(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(setsockopt=lambda *_: None)

    def write(self, data: Buffer) -> None:
        self.writes.append([data])

    def writelines(self, parts: Sequence[Buffer]) -> None:
        self.writes.append(list(parts))


def written(frame: Sequence[Buffer]) -> list[list[Buffer]]:
    wire = Wire()

    async def test() -> None:
        owner = SimpleNamespace(on_connected=lambda _: None)
        connection = Connection(cast(Any, owner), dialled=None, serial=1)
        connection.connection_made(cast(Any, wire))
        connection.write(FrameKind.MESSAGE, frame)

    run(test)
    return wire.writes


def test_a_small_frame_is_one_write_of_one_object() -> None:
    parts = [b"head", b"v" * 1_000, b"tail"]
    assert written(parts) == [[frame_header(FrameKind.MESSAGE, parts) + b"".join(parts)]]


def test_a_large_frame_is_one_write_of_the_objects_that_it_was_given() -> None:
    batch = b"v" * 16_000
    parts: list[Buffer] = [b"head", batch, memoryview(batch), b"tail"]
    (write,) = written(parts)
    assert write[0] == frame_header(FrameKind.MESSAGE, parts)
    assert len(write) == 1 + len(parts)
    assert all(given is part for given, part in zip(write[1:], parts, strict=True))


@pytest.mark.skipif(not CALLS.exists(), reason="the kernel counts no writes per thread")
@pytest.mark.parametrize("size", [1_000, 16_000, 100_000])
def test_a_frame_is_one_system_call(size: int) -> None:
    """Each in a turn of its own: uvloop joins what a turn writes."""

    def calls() -> int:
        return int(dict(line.split(": ") for line in CALLS.read_text().splitlines())["syscw"])

    async def body(pair: Pair) -> None:
        await pair.both_open()
        received, before = pair.handlers[TWO], calls()
        for number in range(1, FRAMES + 1):
            assert pair.networks[ONE].send(TWO, DATA, [b"head", b"v" * size, b"tail"])
            await received.wait_count("message", number, DATA)
        assert FRAMES <= calls() - before <= 1.1 * FRAMES

    minute_ms = 60_000  # pings of idle sessions would count as well, more of them on a slow machine
    paired(TcpSettings(idle_ping_ms=minute_ms, silence_ms_max=2 * minute_ms))(body)()
