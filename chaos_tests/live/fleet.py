"""The nodes of a chaos run as real processes: started, killed, frozen, wiped and asked, one by one.

Owns the processes it starts and their directories. It signals by process id only, and ends all of them at `close`.
Where they meet, what they write to and what time they see is given by `network`, `disks` and `clocks`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chaos_tests.live.clocks import Clocks
from chaos_tests.live.disks import Disks
from chaos_tests.live.network import Links, Network
from chaos_tests.live.raw import RawNode, Unanswered
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cluster_dir import Ports, prepare_cluster
from smq.coordinator.config import format_address, load_config
from smq.raft_state.errors import SmqError

SERVE: Final = (sys.executable, "-m", "smq.coordinator.cli", "serve", "--config")
STOP_S: Final = 20.0  # SIGTERM hands leaderships over before the process ends
ASK_S: Final = 2.0  # one question to one node
POLL_S: Final = 0.05
LOG_TAIL_LINES: Final = 15


class FleetError(RuntimeError):
    """The cluster did not do what was waited for; the message ends with the log's end."""


@dataclass(slots=True)
class Member:
    """One node. `starts` counts its processes, the running one included."""

    id: int
    config: Path
    data: Path
    log: Path
    grpc: str
    http: str
    kafka: str
    raw: RawNode
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    is_paused: bool = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of the node itself, whatever wrapper (nsenter) started it: wrappers exec."""
        assert self.process is not None
        return self.process.pid

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


@dataclass(slots=True)
class Fleet:
    """`serve` is the command that runs a node, its config file to be appended: the planted bugs have their own."""

    root: Path
    size: int
    network: Network
    disks: Disks
    clocks: Clocks | None = None
    serve: Sequence[str] = SERVE
    members: dict[int, Member] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- processes
    def start(self) -> None:
        """Makes the cluster and starts every node; returns when all are ready."""
        paths = prepare_cluster(self.root / "nodes", self.size, Ports(grpc=0, http=0, kafka=0))
        self.network.prepare(paths)
        for path in paths:
            config = load_config(path)
            assert config.kafka_address is not None
            self.members[config.node_id] = Member(
                id=config.node_id,
                config=path,
                data=config.data_dir,
                log=path.with_name("node.log"),
                grpc=format_address(config.grpc_address),
                http=format_address(config.http_address),
                kafka=format_address(config.kafka_address),
                raw=RawNode(format_address(config.grpc_address)),
            )
            self.disks.prepare(config.node_id, config.data_dir)
        for node in self.members:
            self.run(node)
        self.wait_ready()

    def run(self, node: int) -> None:
        """Starts the process of a node that has none; does not wait."""
        member = self.members[node]
        if member.is_running:
            raise FleetError(f"node {node} runs already")
        environment = dict(os.environ) | (self.clocks.environment(node) if self.clocks is not None else {})
        command = self.network.command(node, [*self.serve, str(member.config)])
        with member.log.open("ab") as log:
            member.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        member.starts += 1
        member.is_paused = False

    def kill(self, *nodes: int) -> None:
        """SIGKILL to all of them before waiting for any."""
        running = [self.members[node] for node in nodes if self.members[node].is_running]
        for member in running:
            os.kill(member.pid, signal.SIGKILL)
        for member in running:
            assert member.process is not None
            member.process.wait()

    def terminate(self, node: int) -> None:
        """SIGTERM, and its end; SIGKILL where that takes too long."""
        member = self.members[node]
        if not member.is_running or member.process is None:
            return
        member.process.send_signal(signal.SIGTERM)
        try:
            member.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()

    def pause(self, node: int) -> None:
        if self.members[node].is_running:
            os.kill(self.members[node].pid, signal.SIGSTOP)
            self.members[node].is_paused = True

    def resume(self, node: int) -> None:
        member = self.members[node]
        if member.is_running and member.is_paused:
            os.kill(member.pid, signal.SIGCONT)
        member.is_paused = False

    def heal(self) -> None:
        """Everything runs, nothing is between the nodes, every clock is right."""
        self.network.impose(Links())
        for node, member in self.members.items():
            self.resume(node)
            if self.clocks is not None:
                self.clocks.move(node)
            if not member.is_running:
                self.run(node)

    def wipe(self, node: int) -> None:
        """The disk of a node that is down is replaced by an empty one."""
        assert not self.members[node].is_running
        self.disks.wipe(node)

    def close(self) -> None:
        for member in self.members.values():
            if member.is_running:
                with suppress(ProcessLookupError):
                    os.killpg(member.pid, signal.SIGKILL)
                assert member.process is not None
                member.process.wait()
            member.raw.close()
        self.disks.close()
        self.network.close()

    def discard_data(self) -> None:
        """After a run without findings: logs and configurations stay, data directories go."""
        for member in self.members.values():
            shutil.rmtree(member.data, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------- asking
    def up(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_running and not member.is_paused]

    def status(self, node: int, *, with_digest: bool = False) -> pb.NodeStatusResponse | None:
        """What a node says of itself; None where it does not answer."""
        member = self.members[node]
        if not member.is_running or member.is_paused:
            return None
        try:
            request = pb.NodeStatusRequest(with_digest=with_digest)
            return member.raw.call(member.raw.admin.NodeStatus, request, ASK_S)
        except (SmqError, Unanswered):
            return None

    def describe(self, node: int) -> pb.DescribeClusterResponse | None:
        member = self.members[node]
        if not member.is_running or member.is_paused:
            return None
        try:
            return member.raw.call(member.raw.admin.DescribeCluster, pb.DescribeClusterRequest(), ASK_S)
        except (SmqError, Unanswered):
            return None

    def raft_leader(self) -> int | None:
        """Of the highest term that anybody who answers knows."""
        best: tuple[int, int] | None = None
        for member in self.up():
            status = self.status(member.id)
            if status is not None and status.raft_leader:
                best = max(best or (-1, 0), (status.raft_term, status.raft_leader))
        return best[1] if best is not None else None

    def leaders(self) -> dict[str, int]:
        """topic/partition -> its leader, as the first node that answers knows it."""
        for member in self.up():
            described = self.describe(member.id)
            if described is not None:
                return {f"{t.name}/{p.partition}": p.leader for t in described.topics for p in t.partitions}
        return {}

    # ---------------------------------------------------------------------------------------------- waiting
    def wait(self, what: str, is_done: Callable[[], bool], timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > give_up:
                raise FleetError(f"not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)

    def wait_ready(self, nodes: Iterable[int] = (), timeout_s: float = 60.0) -> None:
        """They run, are registered and have caught up with Raft. FleetError at once where one has ended."""
        for node in list(nodes) or list(self.members):
            member = self.members[node]

            def is_ready(member: Member = member) -> bool:
                if not member.is_running:
                    code = member.process.poll() if member.process is not None else None
                    raise FleetError(f"node {member.id} ended with {code}; its log ends:\n{member.log_tail()}")
                status = self.status(member.id)
                return status is not None and status.is_ready

            self.wait(f"node {node} is ready; its log ends:\n{member.log_tail()}", is_ready, timeout_s)

    def disagreement(self) -> str | None:
        """Why the replicas have not converged yet; None once they have."""
        statuses = {}
        for node in self.members:
            status = self.status(node)
            if status is None or not status.is_ready:
                return f"node {node} is not ready"
            statuses[node] = status
        ends: dict[str, set[tuple[int, int, int]]] = {}
        leaders: set[str] = set()
        for node, status in statuses.items():
            for replica in status.replicas:
                key = f"{replica.topic}/{replica.partition}"
                if not replica.hwm == replica.appended_end == replica.verified_end:
                    return f"{key} on node {node}: hwm {replica.hwm}, verified {replica.verified_end}"
                ends.setdefault(key, set()).add((replica.hwm, replica.epoch, replica.log_start))
                if replica.is_leader:
                    leaders.add(key)
        for key, found in ends.items():
            if len(found) != 1:
                return f"{key}: (hwm, epoch, log start) are {sorted(found)}"
            if key not in leaders:
                return f"{key} has no leader"
        return None
