"""The nodes of one cluster as real processes on this machine: started, killed, frozen, ended and waited for, by id.

Owns every node process that the project starts: subclasses make a cluster for tests and demos (`cluster`) and for live
chaos runs. It signals by process id only. Addresses, directories and how a cluster comes to be are the subclasses'
business. It must never look into a node's files, except for the end of its log.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import Tls
from smq.raft_state.errors import SmqError
from smq.replication.storage.directory import FIRST_START_FILE, make_directory
from smq.testing.node_client import RawNode, Unanswered

T = TypeVar("T")
CLI: Final = (sys.executable, "-m", "smq.coordinator.cli.main")
SERVE: Final = (*CLI, "serve", "--config")
READY_S: Final = 60.0  # three Pythons start within seconds; a loaded machine takes longer
STOP_S: Final = 20.0  # SIGTERM hands leaderships over before the process ends
ASK_S: Final = 2.0  # one request to one node
POLL_S: Final = 0.02  # between two checks of a condition
CLI_S: Final = 30.0  # for a command that takes a second or two on a quiet machine
_LOG_TAIL_LINES: Final = 15


class ClusterError(RuntimeError):
    """The cluster did not reach a condition in time. The message ends with the end of a log if there is one."""


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float = 30.0) -> T:
    """The first truthy result of `condition`; ClusterError naming `what` after `timeout_s` seconds.

    If a node does not answer, or answers with an error, the condition does not hold yet.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        last: object = None
        try:
            found = condition()
            if found:
                return found
            last = found
        except (SmqError, Unanswered) as error:
            last = error
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {timeout_s:g} s: {what}; last seen: {last}")
        time.sleep(POLL_S)


def tail(log: Path) -> str:
    """The last lines of a log, for error messages."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]) if log.exists() else "(no log)"


def add_tuning(config: Path, tuning: Mapping[str, int]) -> None:
    """Adds the table [tuning] to a node.toml that has none yet. It acts when the node starts next."""
    lines = ["", "[tuning]", *(f"{name} = {value}" for name, value in tuning.items()), ""]
    with config.open("a") as file:
        file.write("\n".join(lines))


def end(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGINT) -> None:
    """Sends the signal and waits for the end of the process; then, or after STOP_S, SIGKILL to its whole group."""
    if process.poll() is None:
        process.send_signal(how)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):  # the usual case: the group is empty
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(slots=True)
class Node:
    """One node. `process` is set if the node was started from here; otherwise only its `pid` is known."""

    id: int
    config: Path
    data_dir: Path
    log: Path
    grpc: str
    http: str
    kafka: str
    peer: str = ""  # its address for the other nodes; "" if unknown
    tls: Tls | None = None  # of a cluster that was not started from here; ours have none
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    is_paused: bool = False
    raw: RawNode = field(init=False)

    def __post_init__(self) -> None:
        self.raw = RawNode(self.grpc, self.tls)

    def is_alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        try:
            return self.pid > 0 and "\nState:\tZ" not in Path(f"/proc/{self.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False


@dataclass
class Nodes:
    """`size` nodes under `root`. `serve` is the command that runs one node; its config file is appended."""

    root: Path
    size: int = 3
    serve: Sequence[str] = SERVE
    nodes: dict[int, Node] = field(default_factory=dict)

    @property
    def servers(self) -> str:
        """All gRPC addresses, as clients take them."""
        return ",".join(node.grpc for node in self.nodes.values())

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive()]

    # --------------------------------------------------------------------------------------------- processes
    def command(self, node: int, command: list[str]) -> list[str]:
        """The command line that runs a node. A subclass may wrap it."""
        return command

    def environment(self, node: int) -> dict[str, str]:
        """Variables for the node, beside those of this process that are not settings of a node: they would be the same
        for all nodes, which have their files."""
        return {}

    def ask_first_start(self) -> None:
        """As `smq first-start` does: these nodes, all of them on empty disks, begin a cluster when they start."""
        first = next(iter(self.nodes.values())).data_dir
        make_directory(first)
        (first / FIRST_START_FILE).touch()

    def begin(self) -> None:
        """Starts a new cluster of these nodes; returns when all are ready."""
        self.ask_first_start()
        for node in self.nodes:
            self.run(node)
        self.wait_ready()

    def run(self, node: int, *, before: Sequence[str] = ()) -> None:
        """Starts the process of a node that has none; does not wait. `before` is put in front of its command."""
        member = self.nodes[node]
        if member.is_alive():
            raise ClusterError(f"node {node} is already running")
        command = self.command(node, [*before, *self.serve, str(member.config)])
        others = {name: value for name, value in os.environ.items() if not name.startswith("SMQ_")}
        with member.log.open("ab") as log:
            member.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=others | self.environment(node),
            )
        member.pid = member.process.pid  # of the node itself even if a wrapper started it: wrappers exec
        member.starts += 1
        member.is_paused = False

    def kill(self, *nodes: int) -> None:
        """SIGKILL to all of them before waiting for any: nothing is flushed, and no peer is warned."""
        for node in nodes:
            self.signal(node, signal.SIGKILL)
        for node in nodes:
            self.wait_dead(node)

    def terminate(self, node: int) -> None:
        """SIGTERM, and waits for the end; SIGKILL if that takes too long."""
        self.signal(node, signal.SIGTERM)
        try:
            self.wait_dead(node, STOP_S)
        except ClusterError:
            self.kill(node)

    def signal(self, node: int, number: signal.Signals) -> None:
        """Does nothing if the node does not run."""
        if self.nodes[node].is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.nodes[node].pid, number)

    def pause(self, node: int) -> None:
        self.signal(node, signal.SIGSTOP)
        self.nodes[node].is_paused = self.nodes[node].is_alive()

    def resume(self, node: int) -> None:
        self.signal(node, signal.SIGCONT)
        self.nodes[node].is_paused = False

    def heal(self) -> None:
        """Resumes and restarts processes until all run; does not wait until they are ready."""
        for node, member in self.nodes.items():
            self.resume(node)
            if not member.is_alive():
                self.run(node)

    def close(self) -> None:
        """Kills every process that was started from here."""
        for member in self.nodes.values():
            if member.process is not None and member.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(member.process.pid, signal.SIGKILL)
                member.process.wait()
            member.raw.close()

    # ---------------------------------------------------------------------------------------------- waiting
    def wait_dead(self, node: int, timeout_s: float = READY_S) -> None:
        """Returns when the process has ended. There is no delay if it is our own: failovers are measured from here."""
        member = self.nodes[node]
        if member.process is None:
            wait_for(f"the end of node {node}", lambda: not member.is_alive(), timeout_s)
            return
        try:
            member.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"node {node} has not ended within {timeout_s:g} s") from None

    def wait_ready(self, *nodes: int, timeout_s: float = READY_S) -> None:
        """Returns once these nodes (by default all) are registered, have caught up with Raft and see a quorum.

        ClusterError immediately if one of them has ended.
        """
        for node in nodes or tuple(self.nodes):
            what = f"node {node} is ready (its log is {self.nodes[node].log})"
            wait_for(what, partial(self._is_ready, node), timeout_s)

    def _is_ready(self, node: int) -> bool:
        member = self.nodes[node]
        if not member.is_alive():
            code = member.process.poll() if member.process is not None else None
            raise ClusterError(f"node {node} has ended ({code}); its log ends:\n{tail(member.log)}")
        if member.is_paused:
            return False
        return member.raw.call(member.raw.admin.NodeStatus, pb.NodeStatusRequest(), ASK_S).is_ready


def run_cli(*arguments: str, timeout_s: float = CLI_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `smq ARGUMENTS` to its end, whatever the exit code. `options` are those of `subprocess.run`."""
    return subprocess.run([*CLI, *arguments], check=False, capture_output=True, text=True, timeout=timeout_s, **options)
