"""Clusters of real processes for tests and benchmarks: started, killed, frozen and restarted by process id.

`Cluster.start` runs `smq cluster`; a node that was killed comes back by `smq serve --config` of the file that the
cluster wrote for it, as an operator would do it. Everything waits for conditions with a deadline, never for a time.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from chaos_tests.live.raw import RawNode, Unanswered
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError

T = TypeVar("T")
CLI = (sys.executable, "-m", "smq.coordinator.cli")
WAIT_S = 30.0  # for a condition that takes a second or two on a quiet machine
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says
POLL_S = 0.02  # between two looks at a condition


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
    """The first truthy result of `condition`; AssertionError naming `what` once the time is over.

    A node that cannot answer yet, or says so, is a condition that does not hold yet.
    """
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            last = condition()
            if last:
                return last
        except (SmqError, Unanswered) as error:
            last = error
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}; last seen: {last}"
        time.sleep(POLL_S)


@dataclass
class Node:
    """One node's process as it runs now. `own` is set where this harness started it by `serve`."""

    id: int
    pid: int
    grpc: str
    http: str
    kafka: str
    data_dir: Path
    config: Path
    log: Path
    own: subprocess.Popen[bytes] | None = None
    raw: RawNode = field(init=False)

    def __post_init__(self) -> None:
        self.raw = RawNode(self.grpc)

    def is_alive(self) -> bool:
        if self.own is not None:
            return self.own.poll() is None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return "\nState:\tZ" not in Path(f"/proc/{self.pid}/status").read_text()


class Cluster:
    """Three nodes (or another number) under one directory."""

    def __init__(self, root: Path, nodes: int = 3) -> None:
        self.root = root
        self.size = nodes
        self.nodes: dict[int, Node] = {}
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._retired: list[RawNode] = []  # channels to processes that are gone: a new one has no reconnect backoff

    # ------------------------------------------------------------------------------------------- processes
    def start(self, *options: str) -> "Cluster":
        """`smq cluster` on free ports; returns when its ready file is there."""
        self.root.mkdir(parents=True, exist_ok=True)
        ready = self.root / "ready.json"
        command = [*CLI, "cluster", "--nodes", str(self.size), "--data-dir", str(self.root / "data")]
        command += ["--grpc-port", "0", "--http-port", "0", "--ready-file", str(ready), *options]
        log = self.root / "cluster.log"
        with log.open("ab") as out:
            supervisor = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        self._supervisor = supervisor

        def is_ready() -> bool:
            assert supervisor.poll() is None, f"smq cluster ended with {supervisor.returncode}:\n{tail(log)}"
            return ready.exists()

        wait_for(f"the ready file of the cluster; its log ends: {tail(log)}", is_ready, 60)
        for entry in json.loads(ready.read_text())["nodes"]:
            config = self.root / "data" / f"node-{entry['id']}" / "node.toml"
            self.nodes[entry["id"]] = Node(
                id=entry["id"],
                pid=entry["pid"],
                grpc=entry["grpc"],
                http=entry["http"],
                kafka=entry["kafka"],
                data_dir=Path(entry["data_dir"]),
                config=config,
                log=config.with_name("node.log"),
            )
        return self

    def kill(self, *nodes: int) -> None:
        """SIGKILL to all of them before waiting for any."""
        for node in nodes:
            os.kill(self.nodes[node].pid, signal.SIGKILL)
        for node in nodes:
            self.wait_dead(node)

    def signal(self, node: int, number: signal.Signals) -> None:
        os.kill(self.nodes[node].pid, number)

    def wait_dead(self, node: int) -> None:
        wait_for(f"the end of node {node}", lambda: not self.nodes[node].is_alive())

    def restart(self, *nodes: int, wait: bool = True) -> None:
        """Starts killed nodes again, on their old addresses and directories."""
        for node in nodes:
            old = self.nodes[node]
            assert not old.is_alive(), f"node {node} still runs"
            self._retired.append(old.raw)  # a producer's thread may be in the middle of a call
            self.nodes[node] = self._serve(old)
        if wait:
            self.wait_ready(*nodes)

    def _serve(self, old: Node) -> Node:
        log = self.root / f"serve-{old.id}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(serve_command(old.config), stdout=out, stderr=out, start_new_session=True)
        return Node(
            id=old.id,
            pid=process.pid,
            grpc=old.grpc,
            http=old.http,
            kafka=old.kafka,
            data_dir=old.data_dir,
            config=old.config,
            log=log,
            own=process,
        )

    def heal(self) -> None:
        """Every node runs and is ready."""
        for node in self.alive():
            os.kill(node.pid, signal.SIGCONT)
        self.restart(*(node for node in self.nodes if not self.nodes[node].is_alive()), wait=False)
        self.wait_ready()

    def stop(self) -> None:
        """Ends everything that this harness started, gently where that works."""
        for node in self.nodes.values():
            if node.is_alive():
                os.kill(node.pid, signal.SIGCONT)
        if self._supervisor is not None:
            end(self._supervisor)
        for node in self.nodes.values():
            if node.own is not None:
                end(node.own)
            elif node.is_alive():
                os.kill(node.pid, signal.SIGKILL)
            node.raw.close()
        for raw in self._retired:
            raw.close()

    # ---------------------------------------------------------------------------------------------- waiting
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive()]

    def wait_ready(self, *nodes: int) -> None:
        """They are registered, caught up with Raft, and see a quorum."""
        for node in nodes or tuple(self.nodes):
            log = self.nodes[node].log
            wait_for(f"node {node} is ready; its log ends: {tail(log)}", partial(self._is_ready, node))

    def _is_ready(self, node: int) -> bool:
        assert self.nodes[node].is_alive(), f"node {node} ended; its log ends: {tail(self.nodes[node].log)}"
        return self.nodes[node].raw.status().is_ready

    def http_status(self, node: int, path: str) -> int:
        """The status code of a GET."""
        try:
            with _DIRECT.open(f"http://{self.nodes[node].http}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    def wait_http(self, node: int, path: str, status: int) -> None:
        wait_for(f"{path} of node {node} answers {status}", lambda: self.http_status(node, path) == status)

    def partition(self, topic: str, partition: int, via: Iterable[Node] | None = None) -> pb.PartitionInfo | None:
        """As the first node (of `via`, or of all that live) that answers has applied it."""
        for node in via or self.alive():
            try:
                for info in node.raw.describe(topic).topics:
                    return info.partitions[partition]
            except (SmqError, Unanswered):
                continue  # it is going down or coming up, or has not heard of the topic: the next may know
        return None

    def wait_leader(self, topic: str, partition: int, *, other_than: int | None = None) -> int:
        """The node that leads, where that is a live process of its own epoch; all live nodes agree on it."""

        def agreed() -> int | None:
            infos = [self.partition(topic, partition, [node]) for node in self.alive()]
            leaders = {(info.leader, info.epoch) if info and info.leader_available else None for info in infos}
            (found,) = leaders if len(leaders) == 1 else (None,)
            leader = found[0] if found else None
            alive = leader is not None and self.nodes[leader].is_alive()
            return leader if alive and leader != other_than else None

        return wait_for(f"a leader of {topic}/{partition}", agreed)

    def raft_leader(self) -> int:
        """The Raft leader on which all live nodes agree."""

        def agreed() -> int | None:
            leaders = {node.raw.status().raft_leader for node in self.alive()}
            (leader,) = leaders if len(leaders) == 1 else (0,)
            return leader if leader and self.nodes[leader].is_alive() else None

        return wait_for("one Raft leader", agreed)

    def wait_converged(self, topic: str, partitions: int) -> None:
        """Every replica of every partition holds everything up to one high water mark, on every live node."""

        def converged() -> bool:
            for partition in range(partitions):
                ends = set()
                for node in self.alive():
                    info = self.partition(topic, partition, [node])
                    if info is None:
                        return False
                    ends.add(info.hwm)
                    ends |= {
                        replica.verified_end
                        for replica in node.raw.status().replicas
                        if (replica.topic, replica.partition) == (topic, partition)
                    }
                if len(ends) != 1:
                    return False
            return True

        wait_for(f"the replicas of {topic} converge", converged)

    def wait_digests_equal(self) -> str:
        """All live nodes have applied the same index, and their states are the same there. A pair of different
        digests at one index fails at once."""
        seen: dict[int, str] = {}

        def equal() -> str | None:
            statuses = [node.raw.status(with_digest=True) for node in self.alive()]
            for status in statuses:
                known = seen.setdefault(status.applied_index, status.digest)
                assert known == status.digest, f"node {status.node} differs at index {status.applied_index}"
            same = {(status.applied_index, status.digest) for status in statuses}
            return statuses[0].digest if len(same) == 1 and statuses[0].digest else None

        return wait_for("equal digests at one index", equal)


def serve_command(config: Path) -> list[str]:
    """Starts one node."""
    return [*CLI, "serve", "--config", str(config)]


def run_cli(*arguments: str, timeout_s: float = WAIT_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """`smq ARGUMENTS`, to its end, whatever that is."""
    return subprocess.run([*CLI, *arguments], check=False, capture_output=True, text=True, timeout=timeout_s, **options)


def end(process: subprocess.Popen[bytes], timeout_s: float = 15.0) -> None:
    """SIGINT, and SIGKILL where that does not help in time."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for messages of failed assertions."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"
