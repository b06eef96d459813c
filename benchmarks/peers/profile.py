"""Where smq's nodes spend their processor time under each line of the comparison, and under AssignOffsets: one table.

Owns the sampling (py-spy, from outside the nodes) and how samples become shares: each counts for the innermost function
of smq on its stack, by the room of that function's file. Threads that wait do not count. It must never run beside a
measurement: sampling stops the nodes for a moment each time.
"""

import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import offsets
from benchmarks.pages import markdown, rewrite
from benchmarks.peers.lines import LINES
from benchmarks.peers.systems import Smq, running
from benchmarks.report import Report, commit

COMMAND: Final = "python -m benchmarks profile --write"
RATE: Final = 100  # samples per second and node
TOP: Final = 5  # functions named per line
# Longest prefixes first: the first that fits names the room.
ROOMS: Final = {
    "smq/coordinator/kafka/": "Kafka port",
    "smq/coordinator/groups/": "groups",
    "smq/replication/partition/": "partition",
    "smq/replication/log/": "log",
    "smq/replication/raft/": "Raft",
    "smq/replication/net/": "links",
    "smq/replication/storage/": "store",
    "smq/raft_state/": "state",
    "smq/": "other",
}
OUTSIDE: Final = "uvloop"  # no function of smq below the loop is on the stack: uvloop itself, gRPC's threads
LOOP: Final = "run_server (coordinator/server/composition.py)"  # what starts the loop is on each of its stacks
# Functions in C in which a thread sleeps: for events, for work, for Python's lock.
WAITS: Final = frozenset(
    {"epoll_wait", "epoll_pwait", "PyThread_acquire_lock_timed", "pthread_cond_wait", "pthread_cond_timedwait"}
)


def _assign_offsets(smq: Smq, _topic: str, share: float) -> None:
    with smq.watch():
        offsets.load(smq.grpc_servers, calls=round(100_000 * share))


# The lines that a rate or a latency is judged by, and what no other system has.
LOADS: Final[dict[str, Callable[[Smq, str, float], object]]] = {
    **{line.name: line.run for line in LINES if line.judged != "gap_ms"},
    f"AssignOffsets, {offsets.CALLERS} callers": _assign_offsets,
}


class Samples:
    """Counts by room and by innermost function."""

    def __init__(self) -> None:
        self.rooms: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def add(self, folded: Iterable[str]) -> None:
        """Lines of collapsed stacks: `outer (file:1);inner (file:2) count`."""
        for line in folded:
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            if WAITS.intersection(frame.partition(" (")[0] for frame in frames):
                continue
            room, function = _innermost(frames)
            self.rooms[room] += int(count)
            self.functions[function] += int(count)

    def shares(self) -> dict[str, float]:
        """Per cent of all samples, by room."""
        total = self.rooms.total() or 1
        return {room: 100 * self.rooms[room] / total for room in [*dict.fromkeys(ROOMS.values()), OUTSIDE]}

    def top(self) -> list[tuple[str, float]]:
        total = self.functions.total() or 1
        return [(name, 100 * count / total) for name, count in self.functions.most_common(TOP)]


def _innermost(frames: list[str]) -> tuple[str, str]:
    """The room, and the function with its file. A library's time is its caller's: what was called for is what costs."""
    for frame in reversed(frames):
        name, _, place = frame.partition(" (")
        file = place.rpartition(":")[0]
        if "smq/" in file and "site-packages" not in file:
            within = "smq/" + file.rpartition("smq/")[2]
            function = f"{name} ({within.removeprefix('smq/')})"
            if function == LOOP:
                break
            return next(room for prefix, room in ROOMS.items() if within.startswith(prefix)), function
    return OUTSIDE, OUTSIDE


def measure(report: Report, *, share: float, lines: list[str], directory: Path | None = None) -> None:
    """Each load on a fresh cluster, with every node sampled."""
    for name, run in LOADS.items():
        if lines and not any(part in name for part in lines):
            continue
        with tempfile.TemporaryDirectory(prefix="smq-profile-", dir=directory) as root, running(Smq, Path(root)) as smq:
            samples = Samples()
            smq.watch = partial(_sampled, smq.pids, Path(root), samples)
            run(smq, "profile", share)
        add(report, name, samples)


def add(report: Report, line: str, samples: Samples) -> None:
    shares = samples.shares()
    text = ", ".join(f"{room} {value:.0f} %" for room, value in shares.items())
    figures = {f"{room}_percent": value for room, value in shares.items()}
    report.add(line, text, kind="profile", top=samples.top(), **figures)


@contextmanager
def _sampled(pids: list[int], root: Path, samples: Samples) -> Iterator[None]:
    files = [root / f"stacks-{pid}" for pid in pids]
    with ExitStack() as sampling:
        for pid, file in zip(pids, files, strict=True):
            sampling.enter_context(_Sampler(pid, file))
        time.sleep(1)  # until all are attached
        yield
    for file in files:
        samples.add(file.read_text().splitlines())


class _Sampler:
    """py-spy on one process: on entry it begins, on exit its file is whole."""

    def __init__(self, pid: int, file: Path) -> None:
        command = ["py-spy", "record", "--pid", str(pid), "--rate", str(RATE), "--format", "raw", "--output", str(file)]
        self._command = [*command, "--native", "--duration", "unlimited"]

    def __enter__(self) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
            )
        except FileNotFoundError:
            raise SystemExit("py-spy is not installed: `pip install py-spy`, then run the profile again") from None

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGINT)
        _, said = self._process.communicate(timeout=60)
        if self._process.returncode:
            raise RuntimeError(f"py-spy failed: {said.strip()[-500:]}")


def write_profile(report: Report) -> None:
    """Rewrites the table of docs/performance.md."""
    rows = [row for row in report.rows if row.get("kind") == "profile"]
    rooms = [*dict.fromkeys(ROOMS.values()), OUTSIDE]
    cells = [[row["what"], *(f"{row[f'{room}_percent']:.0f}" for room in rooms), _first(row)] for row in rows]
    text = f"At {commit()}, {RATE} samples per second and node; per cent of each line's samples.\n\n"
    text += markdown(["", *rooms, "most time in"], cells)
    rewrite("profile", COMMAND, text, picture=None, results={"commit": commit(), "rows": rows})


def _first(row: dict[str, Any]) -> str:
    name, share = row["top"][0]
    return f"`{name}` {share:.0f}"
