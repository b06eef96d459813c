"""The kinds of faults: how each strikes and is undone.

Owns Arena, Fault and all strikes except those at the network (`faults.network`); `catalogue` names the faults. A strike
returns the nodes that it struck; the run continues between it and its undo. Waiting for the cluster is left to the run,
except where an operator would wait.
"""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chaos_tests.live.fleet import Fleet
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.replication.storage.index import DATA_FILE
from smq.testing.node_client import Unanswered

_STORM_KILLS: Final = 3
_PAGE: Final = 4096
FLIPS: Final = 20  # bits per fault
INDEX_SHARE: Final = 0.5  # of the damages to files
_DAMAGED_START_S: Final = 20.0
_MEMORY_SLACK: Final = 16 << 20
_HOSTILE_BYTES: Final = 4096
_HOSTILE_CONNECTIONS: Final = 20
# Noise after a beginning that a port understands gets further than noise alone.
_HOSTILE_HEADS: Final = (
    b"",
    b"\x7f\xff\xff\xff",  # a length of 2 GiB, as Kafka's frames and those between nodes begin
    b"\x00\x00\x00\x30\x00SMQP\x00\x01",  # a hello between nodes
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /",
)


@dataclass(slots=True)
class Arena:
    """Everything that a fault may use."""

    fleet: Fleet
    rng: random.Random
    helpers: list[subprocess.Popen[bytes]] = field(default_factory=list)  # strace, burners: ended by `undo`
    flips: int = 0  # flipped bits
    remarks: list[str] = field(default_factory=list)  # for the reader of the report

    @property
    def nodes(self) -> list[int]:
        return sorted(self.fleet.nodes)

    def any_node(self) -> int:
        return self.rng.choice(self.nodes)

    def leader(self) -> int:
        """The node that leads most partitions; any node if none reports."""
        led = list(self.fleet.leaders().values())
        return max(self.nodes, key=lambda node: (led.count(node), node)) if led else self.any_node()

    def majority(self) -> list[int]:
        return sorted(self.rng.sample(self.nodes, len(self.nodes) // 2 + 1))

    def minority(self) -> list[int]:
        return sorted(self.rng.sample(self.nodes, (len(self.nodes) - 1) // 2))

    def end_helpers(self) -> None:
        for helper in self.helpers:
            helper.terminate()
        for helper in self.helpers:
            try:
                helper.wait(5)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()
        self.helpers.clear()


FAILOVERS: Final = ("kill", "isolate", "pause")  # families with a failover, whose duration is measured

Strike = Callable[[Arena], list[int]]  # returns the nodes that it struck
Undo = Callable[[Arena, list[int]], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """`keeps_majority`: a majority of nodes stays untouched, so acknowledgements must continue."""

    name: str
    family: str  # kill, isolate, pause, restart, network, disk, clock, pressure, hostile, hook
    says: str
    strike: Strike
    undo: Undo
    needs: frozenset[str] = frozenset()
    keeps_majority: bool = True
    hold_s: tuple[float, float] = (2.0, 4.0)  # longer than the session timeout: others take over


# -------------------------------------------------------------------------------------------- kills and pauses
def killed(choose: Callable[[Arena], list[int]]) -> Strike:
    def strike(arena: Arena) -> list[int]:
        nodes = choose(arena)
        arena.fleet.kill(*nodes)
        return nodes

    return strike


def started(arena: Arena, nodes: list[int]) -> None:
    for node in nodes:
        if not arena.fleet.nodes[node].is_alive():
            arena.fleet.run(node)


def quick_restart(arena: Arena) -> list[int]:
    """The leader is back before any node can have noticed: the session timeout is 1.5 s."""
    node = arena.leader()
    for _ in range(_STORM_KILLS):
        arena.fleet.kill(node)
        arena.fleet.run(node)
        time.sleep(arena.rng.uniform(0.2, 1.0))
    return [node]


def rolling_restart(arena: Arena) -> list[int]:
    """SIGTERM, as in an upgrade: each node hands over, ends, and is ready again before the next one."""
    for node in arena.nodes:
        arena.fleet.terminate(node)
        arena.fleet.run(node)
        arena.fleet.wait_ready(node)
    return arena.nodes


def paused(choose: Callable[[Arena], list[int]]) -> Strike:
    def strike(arena: Arena) -> list[int]:
        nodes = choose(arena)
        for node in nodes:
            arena.fleet.pause(node)
        return nodes

    return strike


def resumed(arena: Arena, nodes: list[int]) -> None:
    for node in nodes:
        arena.fleet.resume(node)


def nothing(arena: Arena, nodes: list[int]) -> None:
    """Nothing to undo: the fault is over once it has struck."""


# ------------------------------------------------------------------------------------------------------- disks
def wiped(arena: Arena) -> list[int]:
    node = arena.any_node()
    arena.fleet.kill(node)
    arena.fleet.wipe(node)
    return [node]


def damaged(change: Callable[[Arena, Path], int]) -> Strike:
    """Damages a file of a stopped node: the index, or one of the log."""

    def strike(arena: Arena) -> list[int]:
        node = arena.any_node()
        arena.fleet.kill(node)
        pattern = DATA_FILE if arena.rng.random() < INDEX_SHARE else "log/*.log"
        file = arena.rng.choice(sorted(arena.fleet.nodes[node].data_dir.rglob(pattern)))
        arena.flips += change(arena, file)
        return [node]

    return strike


def flip_bits(arena: Arena, file: Path) -> int:
    """Flips one bit in each of several used pages."""
    size = file.stat().st_size
    flips = 0
    with file.open("r+b") as f:
        for _ in range(FLIPS * 50):
            page = arena.rng.randrange(size // _PAGE) * _PAGE
            f.seek(page)
            data = bytearray(f.read(_PAGE))
            used = [i for i, byte in enumerate(data) if byte]
            if not used:
                continue  # a hole
            data[arena.rng.choice(used)] ^= 1 << arena.rng.randrange(8)
            f.seek(page)
            f.write(data)
            flips += 1
            if flips == FLIPS:
                break
    return flips


def truncate(arena: Arena, file: Path) -> int:
    os.truncate(file, arena.rng.randrange(file.stat().st_size // _PAGE) * _PAGE)
    return 0


def repaired(arena: Arena, nodes: list[int]) -> None:
    """Follows docs/operations.md: starts the node again, and empties its directory first if it refuses or dies. Also
    empties it if the store's tree is damaged, once the node has shown its reaction: a damaged page read later would end
    the node in the middle of the next fault, and then two of three nodes would be down."""
    for node in nodes:
        member = arena.fleet.nodes[node]
        is_complete = has_complete_tree(member.data_dir)
        arena.fleet.run(node)
        give_up = time.monotonic() + _DAMAGED_START_S
        is_ready = False
        while member.is_alive() and time.monotonic() < give_up and not is_ready:
            status = arena.fleet.status(node)
            is_ready = status is not None and status.is_ready
            time.sleep(0.1)
        if is_ready and is_complete:
            continue
        code = member.process.poll() if member.process is not None else None
        how = "came back, and its tree is damaged" if is_ready else f"did not come back from its damaged files ({code})"
        arena.remarks.append(f"node {node} {how}: emptied")
        arena.fleet.kill(node)
        arena.fleet.wipe(node)
        arena.fleet.run(node)


def has_complete_tree(data_dir: Path) -> bool:
    """For a node that is down. A damaged tree may end the process that walks it."""
    code = f"from smq.replication.storage.index import walk; walk({str(data_dir)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def power_cut(choose: Callable[[Arena], list[int]]) -> Strike:
    def strike(arena: Arena) -> list[int]:
        nodes = choose(arena)
        power = arena.fleet.disks.power
        assert power is not None, "drawn only if power can be cut"
        for node in nodes:
            power.cut(node)
        arena.fleet.kill(*nodes)
        for node in nodes:
            power.restore(node)
        return nodes

    return strike


def traced(*inject: str) -> Strike:
    """Makes system calls of one node's process fail or slow, with strace."""

    def strike(arena: Arena) -> list[int]:
        node = arena.leader()
        pid = str(arena.fleet.nodes[node].pid)
        options = [word for rule in inject for word in ("-e", f"inject={rule}")]
        command = [
            "strace",
            "-f",
            "-qqq",
            "-o",
            "/dev/null",
            "-e",
            "trace=fdatasync,fsync,pwrite64,msync,pread64,preadv2",
        ]
        arena.helpers.append(subprocess.Popen([*command, *options, "-p", pid], stderr=subprocess.DEVNULL))
        return [node]

    return strike


def untraced(arena: Arena, nodes: list[int]) -> None:
    """Starts a node again that has ended itself, as it must when its disk fails."""
    arena.end_helpers()
    started(arena, nodes)


# ------------------------------------------------------------------------------------------------------ clocks
def clock(offset_s: Callable[[random.Random], float], drift_ppm: int = 0) -> Strike:
    def strike(arena: Arena) -> list[int]:
        node = arena.leader()
        assert arena.fleet.clocks is not None
        arena.fleet.clocks.move(node, offset_s=offset_s(arena.rng), drift_ppm=drift_ppm)
        return [node]

    return strike


def clock_right(arena: Arena, nodes: list[int]) -> None:
    assert arena.fleet.clocks is not None
    for node in nodes:
        arena.fleet.clocks.move(node)


# ---------------------------------------------------------------------------------------------------- pressure
def burn(arena: Arena) -> list[int]:
    """More busy processes than cores."""
    for _ in range((os.cpu_count() or 2) * 2):
        arena.helpers.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    return arena.nodes


def calm(arena: Arena, nodes: list[int]) -> None:
    arena.end_helpers()


def limited(resource_kind: int, used: Callable[[int], int]) -> Strike:
    """A node may get no more of it than its process, by its id, has."""

    def strike(arena: Arena) -> list[int]:
        node = arena.leader()
        pid = arena.fleet.nodes[node].pid
        _, hard = resource.prlimit(pid, resource_kind)
        resource.prlimit(pid, resource_kind, (used(pid), hard))
        return [node]

    return strike


def unlimited(resource_kind: int) -> Undo:
    def undo(arena: Arena, nodes: list[int]) -> None:
        for node in nodes:
            member = arena.fleet.nodes[node]
            if member.is_alive():
                _, hard = resource.prlimit(member.pid, resource_kind)
                resource.prlimit(member.pid, resource_kind, (hard, hard))
            else:
                arena.fleet.run(node)

    return undo


def descriptors(pid: int) -> int:
    """Its open files and connections."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    """Its address space, and a little more."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + _MEMORY_SLACK


# ------------------------------------------------------------------------------------------------- leaderships
def storm(arena: Arena) -> list[int]:
    """Drains and undrains every node in turn: all leaderships move away and back."""
    for node in arena.nodes:
        for drained in (True, False):
            for member in arena.fleet.up():
                request = pb.SetNodeDrainedRequest(
                    node=node, drained=drained, request_id=arena.rng.randbytes(16), timeout_ms=2000
                )
                try:
                    member.raw.call(member.raw.admin.SetNodeDrained, request, 3.0)
                except (SmqError, Unanswered):
                    continue  # the next node may be able to
                break
            time.sleep(arena.rng.uniform(0.3, 0.8))
    return arena.nodes


# ----------------------------------------------------------------------------------------------------- hostile
def hostile(arena: Arena) -> list[int]:
    """Sends noise to every port of every node."""
    for member in arena.fleet.up():
        for address in filter(None, (member.grpc, member.http, member.kafka, member.peer)):
            host, _, port = address.rpartition(":")
            for _ in range(_HOSTILE_CONNECTIONS):
                noise = arena.rng.randint(1, _HOSTILE_BYTES)
                with suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as sock:
                    sock.settimeout(1)
                    sock.sendall(arena.rng.choice(_HOSTILE_HEADS) + arena.rng.randbytes(noise))
    return arena.nodes


def any_node(arena: Arena) -> list[int]:
    return [arena.any_node()]


def the_leader(arena: Arena) -> list[int]:
    return [arena.leader()]


def every_node(arena: Arena) -> list[int]:
    return arena.nodes


def end_everything(arena: Arena) -> None:
    """Ends every fault that is still under way."""
    arena.end_helpers()
    for member in arena.fleet.nodes.values():
        if member.is_alive() and member.is_paused:
            os.kill(member.pid, signal.SIGCONT)
    arena.fleet.heal()
