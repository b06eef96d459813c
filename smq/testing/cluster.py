"""Clusters of real processes for tests and benchmarks: what `smq.testing.smq_cluster` starts, and conditions to wait
for. Everything waits for conditions with a deadline, never for a time.
"""

import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.testing.node_client import Unanswered
from smq.testing.processes import CLI, SERVE, Node, end, tail, wait_for
from smq.testing.smq_cluster import Cluster as LiveCluster

__all__ = ["CLI", "SERVE", "Cluster", "Node", "end", "run_cli", "tail", "wait_for"]

CLI_S = 30.0  # for a command that takes a second or two on a quiet machine
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says


@dataclass
class Cluster(LiveCluster):
    """Three nodes (or another number) under one directory."""

    def start(self, *options: str) -> "Cluster":
        super().start(*options)
        return self

    def heal(self) -> None:
        """Every node runs and is ready."""
        super().heal()
        self.wait_ready()

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

    def end_on_purpose(self, node: int, topic: str) -> str:
        """SIGTERM; what the node logged from there on. By its end it has given away what it led of the topic: after a
        kill the others would still take it for the leader, until it has been silent for a while."""
        victim = self.nodes[node]
        known = len(victim.log.read_bytes())
        self.signal(node, signal.SIGTERM)
        self.wait_dead(node)
        ask = partial(self.alive()[0].raw.describe, topic, linearizable=True)
        (found,) = wait_for("an answer of those who are left", ask).topics
        assert node not in {partition.leader for partition in found.partitions}, "it has not handed over what it led"
        return victim.log.read_bytes()[known:].decode()

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
                    if node.id in info.replicas:
                        ends.add(_verified_end(node, topic, partition))
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


def _verified_end(node: Node, topic: str, partition: int) -> int:
    """Of a node's own replica; -1 where it has none yet."""
    for replica in node.raw.status().replicas:
        if (replica.topic, replica.partition) == (topic, partition):
            return replica.verified_end
    return -1


def run_cli(*arguments: str, timeout_s: float = CLI_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """`smq ARGUMENTS`, to its end, whatever that is."""
    return subprocess.run([*CLI, *arguments], check=False, capture_output=True, text=True, timeout=timeout_s, **options)
