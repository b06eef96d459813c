"""A cluster as a user starts it: `smq cluster`, and `smq serve` for a node that comes back.

Owns that one process and its ready file, the conditions that a caller waits for (a leader, equal replicas, equal
digests), and the append of a batch at whichever node leads. Everything waits for a condition with a deadline, never for
a fixed time. Tests, benchmarks, the demo and the examples use it.
"""

import itertools
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.cluster_dir import Ports, prepare_cluster
from smq.raft_state.errors import AppendLost, LeaderUnavailable, NotLeader, SmqError
from smq.testing.node_client import Unanswered
from smq.testing.node_process import CLI, READY_S, ClusterError, Node, Nodes, add_tuning, end, tail, wait_for

PUBLISH_TRIES = 20  # each waits for a leader that all live nodes agree on
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says


@dataclass
class Cluster(Nodes):
    """`size` nodes under the directory `root`. They are children of `smq cluster` until they are killed and restarted
    from here."""

    _parent: subprocess.Popen[bytes] | None = None
    _topic_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def directory(self) -> Path:
        """The --data-dir of `smq cluster`."""
        return self.root / "data"

    @property
    def log(self) -> Path:
        """The log of `smq cluster` itself; each node has its own."""
        return self.root / "cluster.log"

    # ---------------------------------------------------------------------------------------- start and stop
    def start(self, *options: str, **tuning: int) -> "Cluster":
        """Runs `smq cluster` on free ports, with `options` added; returns when every node is ready. `tuning` are
        settings of the table [tuning] of every node of a new cluster."""
        self.root.mkdir(parents=True, exist_ok=True)
        if tuning:
            for path in prepare_cluster(self.directory, self.size, Ports(grpc=0, http=0)):
                add_tuning(path, tuning)
        ready = self.root / "ready.json"
        command = [*CLI, "cluster", "--nodes", str(self.size), "--data-dir", str(self.directory)]
        command += ["--grpc-port", "0", "--http-port", "0", "--ready-file", str(ready), *options]
        with self.log.open("ab") as log:
            parent = self._parent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        def is_ready() -> bool:
            if parent.poll() is not None:
                raise ClusterError(f"smq cluster has ended ({parent.returncode}); its log ends:\n{tail(self.log)}")
            return ready.exists()

        wait_for(f"a ready cluster (its log is {self.log})", is_ready, READY_S)
        for started in json.loads(ready.read_text())["nodes"]:
            config = self.directory / f"node-{started['id']}" / "node.toml"
            self.nodes[started["id"]] = Node(
                id=started["id"],
                config=config,
                data_dir=Path(started["data_dir"]),
                log=config.with_name("node.log"),
                grpc=started["grpc"],
                http=started["http"],
                kafka=started["kafka"],
                pid=started["pid"],
            )
        return self

    def tune(self, **tuning: int) -> None:
        """Adds settings to the table [tuning] of every node, which has none yet, and restarts them all to act on it."""
        for node in self.nodes.values():
            add_tuning(node.config, tuning)
        self.kill(*self.nodes)
        self.restart(*self.nodes)

    def restart(self, *nodes: int, wait: bool = True) -> None:
        """Starts nodes that have ended, on their old addresses and directories, as an operator would."""
        for node in nodes:
            self.run(node)
        if wait:
            self.wait_ready(*nodes)

    def heal(self) -> None:
        """Resumes and restarts nodes until all of them run and are ready."""
        super().heal()
        self.wait_ready()

    def stop(self) -> None:
        """Ends everything that was started from here, gracefully if possible."""
        for node in self.nodes:
            self.resume(node)
        if self._parent is not None:
            end(self._parent)  # as Ctrl-C, which it passes on to its nodes
        for member in self.nodes.values():
            if member.process is not None:
                end(member.process)
            elif member.is_alive():
                self.signal(member.id, signal.SIGKILL)
        self.close()

    def end_on_purpose(self, node: int, topic: str) -> str:
        """Sends SIGTERM and waits for the end; returns what the node logged from there on.

        Asserts that the node has handed over every partition of `topic` that it led. After a kill, the others would
        still take it for the leader until it has been silent for a while.
        """
        victim = self.nodes[node]
        known = len(victim.log.read_bytes())
        self.signal(node, signal.SIGTERM)
        self.wait_dead(node)
        describe = partial(self.alive()[0].raw.describe, topic, linearizable=True)
        (found,) = wait_for("an answer from a remaining node", describe).topics
        assert node not in {partition.leader for partition in found.partitions}, "it has not handed over what it led"
        return victim.log.read_bytes()[known:].decode()

    # ------------------------------------------------------------------------------------------------- topics
    def make_topic(self, partitions: int = 1, **fields: Any) -> str:
        """Creates a topic under a fresh name; returns the name once every live node sees a leader of each partition.

        `fields` are those of CreateTopicRequest.
        """
        name = f"t{next(self._topic_numbers)}"
        self.alive()[0].raw.create_topic(name, partitions, **fields)
        for partition in range(partitions):
            self.wait_leader(name, partition)
        return name

    def publish_batch(self, topic: str, partition: int, batch: bytes) -> None:
        """Appends `batch` at the leader, acks=all. It tries again if the leader moves meanwhile or does not lead yet,
        as may be on a busy machine: only errors that say that nothing was kept lead to another try."""
        for tries_left in reversed(range(PUBLISH_TRIES)):
            try:
                self.nodes[self.wait_leader(topic, partition)].raw.publish_batch(topic, partition, batch)
                return
            except (AppendLost, LeaderUnavailable, NotLeader) as e:
                if not tries_left:
                    raise
                time.sleep((e.details.retry_after_ms or 0) / 1000)

    def partition(self, topic: str, partition: int, via: Iterable[Node] | None = None) -> pb.PartitionInfo | None:
        """The partition as the first node that answers has applied it; None if no node knows it.

        Asks the nodes of `via`, by default all that live.
        """
        for node in via or self.alive():
            try:
                for info in node.raw.describe(topic).topics:
                    return info.partitions[partition]
            except (SmqError, Unanswered):
                continue  # it is going down or coming up, or does not know the topic yet: the next may
        return None

    # ------------------------------------------------------------------------------------------------ waiting
    def http_status(self, node: int, path: str) -> int:
        """The status code of a GET."""
        try:
            with _DIRECT.open(f"http://{self.nodes[node].http}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    def wait_http(self, node: int, path: str, status: int) -> None:
        """Returns once a GET of `path` answers `status`."""
        wait_for(f"{path} of node {node} answers {status}", lambda: self.http_status(node, path) == status)

    def wait_leader(self, topic: str, partition: int, *, other_than: int | None = None) -> int:
        """The partition's leader, once it is available, its process lives and all live nodes agree on it."""

        def agreed() -> int | None:
            infos = [self.partition(topic, partition, [node]) for node in self.alive()]
            leaders = {(info.leader, info.epoch) if info and info.leader_available else None for info in infos}
            (found,) = leaders if len(leaders) == 1 else (None,)
            leader = found[0] if found else None
            alive = leader is not None and self.nodes[leader].is_alive()
            return leader if alive and leader != other_than else None

        return wait_for(f"a leader of {topic}/{partition}", agreed)

    def raft_leader(self) -> int:
        """The Raft leader, once all live nodes agree on it."""

        def agreed() -> int | None:
            leaders = {node.raw.status().raft_leader for node in self.alive()}
            (leader,) = leaders if len(leaders) == 1 else (0,)
            return leader if leader and self.nodes[leader].is_alive() else None

        return wait_for("one Raft leader", agreed)

    def wait_converged(self, topic: str, partitions: int) -> None:
        """Returns once every replica on every live node holds everything up to one high water mark per partition."""

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
        """The digest of the replicated state, once all live nodes have applied the same index and agree on it.

        Two different digests at one index fail immediately.
        """
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
    """The verified end of the node's own replica; -1 if it has none yet."""
    for replica in node.raw.status().replicas:
        if (replica.topic, replica.partition) == (topic, partition):
            return replica.verified_end
    return -1


@contextmanager
def live_cluster(root: Path, size: int = 3, **tuning: int) -> Iterator[Cluster]:
    """A running cluster of real processes under `root`. They end with the block, however it ends; the data stays."""
    cluster = Cluster(root, size)
    try:
        yield cluster.start(**tuning)
    finally:
        cluster.stop()
