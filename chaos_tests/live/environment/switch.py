"""A seeded switch in user space: one TAP device per machine, and a configurable link between each two of them.

Owns the forwarding of Ethernet frames: blocked, lost, duplicated, delayed, reordered. A process of its own, so that a
busy harness does not slow the network down: rules come as JSON lines on standard input, each answered by one line on
standard output; the end of standard input ends it. It needs CAP_NET_ADMIN where it is started.

    python -m chaos_tests.live.environment.switch SEED NAME [NAME ...]      # port i is the TAP device NAME[i]
    {"rules": [[from, to, {"blocked": true}], ...]}             # replaces all rules; ports are indices
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

from chaos_tests.live.environment.links import GOOD, Link

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_FRAME_MAX: Final = 65_550
_HELD_MAX: Final = 20_000  # delayed frames; more are lost, as in any switch with a full buffer
_BURST: Final = 64  # frames taken from one port before the others get their turn


def open_tap(name: str) -> int:
    """Creates the TAP device `name`; returns a non-blocking descriptor of it. The descriptor stays ours when the
    interface moves to another namespace."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


class Switch:
    """Ports are indices into `taps`."""

    def __init__(self, taps: list[int], rng: random.Random) -> None:
        self._taps = taps
        self._rng = rng
        self._rules: dict[tuple[int, int], Link] = {}
        self._where: dict[bytes, int] = {}  # MAC address -> port
        self._held: list[tuple[float, int, int, bytes]] = []  # due, tie-break, port, frame
        self._count = 0

    def impose(self, rules: Iterable[tuple[int, int, dict[str, Any]]]) -> None:
        self._rules = {(a, b): Link(**fields) for a, b, fields in rules}

    def run(self, commands: int) -> None:
        """Runs until `commands` ends."""
        poll = select.epoll()
        poll.register(commands, select.EPOLLIN)
        ports = {tap: port for port, tap in enumerate(self._taps)}
        for tap in self._taps:
            poll.register(tap, select.EPOLLIN)
        pending = b""
        while True:
            wait = max(0.0, self._held[0][0] - time.monotonic()) if self._held else -1
            for fd, _ in poll.poll(wait):
                if fd != commands:
                    self._receive(ports[fd], fd)
                    continue
                data = os.read(commands, 1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self.impose(json.loads(line)["rules"])
                    print("ok", flush=True)
            self._deliver_due()

    def _receive(self, port: int, tap: int) -> None:
        for _ in range(_BURST):
            try:
                frame = os.read(tap, _FRAME_MAX)
            except (BlockingIOError, OSError):
                return  # nothing more, or the interface is not up yet
            self._where[frame[6:12]] = port
            known = self._where.get(frame[:6])
            for out in [known] if known is not None else range(len(self._taps)):
                if out != port:
                    self._forward(port, out, frame)

    def _forward(self, port: int, out: int, frame: bytes) -> None:
        link = self._rules.get((port, out), GOOD)
        if link is GOOD:
            self._write(out, frame)
            return
        if link.blocked or self._rng.random() < link.loss:
            return
        copies = 2 if self._rng.random() < link.duplicate else 1
        for _ in range(copies):
            wait_ms = link.delay_ms + self._rng.random() * link.jitter_ms
            if wait_ms <= 0:
                self._write(out, frame)
            elif len(self._held) < _HELD_MAX:
                self._count += 1
                heapq.heappush(self._held, (time.monotonic() + wait_ms / 1000, self._count, out, frame))

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, _, out, frame = heapq.heappop(self._held)
            self._write(out, frame)

    def _write(self, port: int, frame: bytes) -> None:
        try:
            os.write(self._taps[port], frame)
        except OSError:
            pass  # the machine is gone or its queue is full: the frame is lost, as on a wire


def main(arguments: list[str]) -> None:
    seed, *names = arguments
    switch = Switch([open_tap(name) for name in names], random.Random(int(seed)))
    print("ready", flush=True)
    switch.run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
