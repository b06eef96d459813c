"""The nodes of a chaos run: each on a network, a disk and a clock that faults can strike.

Owns the setup of such a cluster and a run's queries to it. `network`, `disks` and `clocks` provide the nodes'
environment; `Nodes` owns their processes.
"""

import shutil
import urllib.request
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from chaos_tests.live.environment.clocks import Clocks
from chaos_tests.live.environment.disks import Disks
from chaos_tests.live.environment.links import Links, Network
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.cluster_dir import Ports, prepare_cluster
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import load_config
from smq.raft_state.errors import SmqError
from smq.testing.node_client import Unanswered
from smq.testing.node_process import ASK_S, ClusterError, Node, Nodes, add_tuning, wait_for

_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says
_INCOMPLETE: Final = "smq_partition_incomplete_replicas"


@dataclass(kw_only=True)
class Fleet(Nodes):
    network: Network
    disks: Disks
    clocks: Clocks | None = None
    tuning: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        """Creates the cluster and starts every node; returns when all are ready."""
        paths = prepare_cluster(self.root / "nodes", self.size, Ports(grpc=0, http=0, kafka=0))
        self.network.prepare(paths)
        for path in paths:
            add_tuning(path, self.tuning)
            config = load_config(path)
            assert config.kafka_address is not None
            self.nodes[config.node_id] = Node(
                id=config.node_id,
                config=path,
                data_dir=config.data_dir,
                log=path.with_name("node.log"),
                grpc=format_address(config.grpc_address),
                http=format_address(config.http_address),
                kafka=format_address(config.kafka_address),
                peer=format_address(config.peers[config.node_id]),
            )
            self.disks.prepare(config.node_id, config.data_dir)
        self.begin()

    def command(self, node: int, command: list[str]) -> list[str]:
        return self.network.command(node, command)

    def environment(self, node: int) -> dict[str, str]:
        return self.clocks.environment(node) if self.clocks is not None else {}

    def heal(self) -> None:
        """Makes every node run, every link good and every clock correct."""
        self.network.impose(Links())
        if self.clocks is not None:
            for node in self.nodes:
                self.clocks.move(node)
        super().heal()

    def wipe(self, node: int) -> None:
        """Replaces the disk of a node that is down by an empty one."""
        assert not self.nodes[node].is_alive()
        self.disks.wipe(node)

    def close(self) -> None:
        super().close()
        self.disks.close()
        self.network.close()

    def discard_data(self) -> None:
        """After a run without findings: logs and configurations stay, data directories go."""
        for node in self.nodes.values():
            shutil.rmtree(node.data_dir, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------- asking
    def up(self) -> list[Node]:
        return [node for node in self.alive() if not node.is_paused]

    def status(self, node: int, *, with_digest: bool = False) -> pb.NodeStatusResponse | None:
        """A node's own report; None if it does not answer."""
        member = self.nodes[node]
        if not member.is_alive() or member.is_paused:
            return None
        try:
            request = pb.NodeStatusRequest(with_digest=with_digest)
            return member.raw.call(member.raw.admin.NodeStatus, request, ASK_S)
        except (SmqError, Unanswered):
            return None

    def describe(self, node: int) -> pb.DescribeClusterResponse | None:
        member = self.nodes[node]
        if not member.is_alive() or member.is_paused:
            return None
        try:
            return member.raw.call(member.raw.admin.DescribeCluster, pb.DescribeClusterRequest(), ASK_S)
        except (SmqError, Unanswered):
            return None

    def raft_leader(self) -> int | None:
        """The leader of the highest term that any answering node knows."""
        best: tuple[int, int] | None = None
        for member in self.up():
            status = self.status(member.id)
            if status is not None and status.raft_leader:
                best = max(best or (-1, 0), (status.raft_term, status.raft_leader))
        return best[1] if best is not None else None

    def leaders(self) -> dict[str, int]:
        """topic/partition -> its leader in the newest epoch that an answering node knows: one that is cut off, and may
        lead no longer, answers with an old one."""
        newest: dict[str, tuple[int, int]] = {}
        for member in self.up():
            described = self.describe(member.id)
            for topic in described.topics if described is not None else ():
                for p in topic.partitions:
                    key = f"{topic.name}/{p.partition}"
                    newest[key] = max(newest.get(key, (-1, 0)), (p.epoch, p.leader))
        return {key: leader for key, (_, leader) in newest.items()}

    def incomplete(self) -> list[str] | None:
        """topic/partition of which a replica may lack what it had acknowledged (rule 22), as the first node says that
        answers; None if none does."""
        for member in self.up():
            try:
                with _DIRECT.open(f"http://{member.http}/metrics", timeout=ASK_S) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            families = {family.name: family for family in text_string_to_metric_families(text)}
            found = families[_INCOMPLETE].samples
            return [f"{sample.labels['topic']}/{sample.labels['partition']}" for sample in found if sample.value]
        return None

    def wait_complete(self, timeout_s: float) -> None:
        """Returns once every replica has what it had acknowledged. Before that, the death of another node may leave too
        few for a leader."""
        missing: list[str] | None = None

        def are_complete() -> bool:
            nonlocal missing
            missing = self.incomplete()
            return missing == []

        try:
            wait_for("all replicas complete", are_complete, timeout_s)
        except ClusterError as e:
            raise ClusterError(f"{e}; incomplete: {missing}") from None

    def disagreement(self) -> str | None:
        """The reason why the replicas have not converged yet; None once they have."""
        statuses = {}
        for node in self.nodes:
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
