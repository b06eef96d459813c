"""A cluster of real processes whose nodes can be killed, frozen, cut off from each other, and given a wrong clock.

Owns the faults and their end. Each call returns when its fault holds, and `heal` when the cluster is whole again. It
decides nothing about data. The pytest plugin offers it as fixtures.
"""

import itertools
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from smq.coordinator.cli.cluster_dir import Ports, prepare_cluster
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import load_config
from smq.testing.cluster import Cluster
from smq.testing.faulty_node import APPLIED_FILE, COMMAND, FAULTS_FILE
from smq.testing.node_process import Node, add_tuning, wait_for

NS_PER_S: Final = 1_000_000_000
_NUMBERS: Final = itertools.count(1)  # of faults; one cluster may have several `Faults`, one after another


class FaultyCluster(Cluster):
    """As Cluster, but every node is a child of this process and obeys `Faults`."""

    def __init__(self, root: Path, size: int = 3) -> None:
        super().__init__(root, size, serve=COMMAND)

    def start(self, *options: str, **tuning: int) -> "FaultyCluster":
        """Runs the nodes on free ports; returns when every node is ready. It takes no options of `smq cluster`."""
        if options:
            raise ValueError(f"a faulty cluster takes no options, and got {options}: use smq.testing.cluster")
        settings = {"group.initial.rebalance.delay.ms": "0"}  # a test's consumer should not wait for others
        ports = Ports(grpc=0, http=0, kafka=0)
        for path in prepare_cluster(self.directory, self.size, ports, settings=settings):
            if tuning:
                add_tuning(path, tuning)
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
        self.begin()
        return self

    @property
    def kafka(self) -> str:
        """What Kafka clients call bootstrap.servers."""
        return ",".join(node.kafka for node in self.nodes.values())


@dataclass
class Faults:
    """`partition` and `isolate` cut links between nodes; clients still reach every node."""

    cluster: FaultyCluster
    _clock_s: float = 0.0

    def kill(self, node: int) -> None:
        """SIGKILL: nothing is flushed, and no peer is warned."""
        self.cluster.kill(node)

    def kill_leader(self, topic: str, partition: int = 0) -> int:
        """Kills the node that leads the partition, and returns its id."""
        leader = self.cluster.wait_leader(topic, partition)
        self.kill(leader)
        return leader

    def restart(self, *nodes: int) -> None:
        """Starts nodes that have ended, and waits until they are ready."""
        self.cluster.restart(*nodes)

    def pause(self, node: int) -> None:
        """Freezes the process (SIGSTOP), as a machine that is overloaded or being moved."""
        self.cluster.pause(node)

    def resume(self, node: int) -> None:
        self.cluster.resume(node)

    def partition(self, *sides: set[int]) -> None:
        """Cuts the links between nodes of different sides. A node that no side names is a side of its own."""
        named = set().union(*sides)
        everyone = set(self.cluster.nodes)
        if len(named) != sum(map(len, sides)) or not named <= everyone:
            raise ValueError(f"the sides {sides} must name nodes of {sorted(everyone)}, each at most once")
        side_of = {node: side for side in sides for node in side}
        self._impose({node: everyone - side_of.get(node, {node}) for node in everyone})

    def isolate(self, node: int) -> None:
        """Cuts a node off from all others."""
        self.partition(set(self.cluster.nodes) - {node})

    def reconnect(self) -> None:
        """Ends every cut."""
        self._impose({node: set() for node in self.cluster.nodes})

    def advance_clock(self, seconds: float) -> None:
        """Moves the wall clock of all nodes on (or back, if negative), as if it had been set. Append times and the age
        of records follow. Timers go on at their pace, and so do retention and expiry: their clock never jumps."""
        self._clock_s += seconds
        self.reconnect()

    def heal(self) -> None:
        """Ends every fault, and waits until all nodes are ready."""
        self._clock_s = 0.0
        for node, member in self.cluster.nodes.items():
            self.cluster.resume(node)
            if not member.is_alive():
                self.cluster.run(node)
        self.reconnect()  # before anything waits: a node that is cut off never becomes ready
        self.cluster.wait_ready()

    def _impose(self, cuts: dict[int, set[int]]) -> None:
        """Returns once every node that runs obeys."""
        number = next(_NUMBERS)
        shift_ns = int(self._clock_s * NS_PER_S)
        for node, cut in cuts.items():
            directory = self.cluster.nodes[node].config.parent
            new = directory / f"{FAULTS_FILE}.new"
            new.write_text(json.dumps({"number": number, "cut": sorted(cut), "clock_ns": shift_ns}))
            os.replace(new, directory / FAULTS_FILE)
        for member in self.cluster.nodes.values():
            if member.is_alive() and not member.is_paused:
                wait_for(f"node {member.id} obeys its faults", partial(_obeys, member.config, number))


def _obeys(config: Path, number: int) -> bool:
    try:
        return config.with_name(APPLIED_FILE).read_text() == str(number)
    except FileNotFoundError:
        return False
