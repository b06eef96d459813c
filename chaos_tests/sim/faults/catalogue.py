"""The faults that a scenario can name, and the targets of their strikes.

Owns the specification of a fault and the choice of its targets. What the strikes do is in `kinds` and `steered`, and
when they come in `schedule`. A fault knows the cluster and the network from outside.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_tests.sim.clients.base import World
from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.rpc import ClientNet, Sleep
from smq.raft_state.ids import Incarnation, NodeId
from smq.testing.virtual.disk import DiskImage


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One `[[fault]]` of a scenario: kind, target, how often and for how long (milliseconds, uniform)."""

    what: str
    target: str = "any"
    every_ms: tuple[float, float] = (1000.0, 4000.0)
    for_ms: tuple[float, float] = (100.0, 1500.0)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Arena:
    """The parts of a run that faults act on."""

    cluster: Cluster
    world: World
    clients: ClientNet
    seen_leaders: Callable[[], tuple[NodeId | None, list[NodeId]]]  # of Raft, and of the partitions
    epochs: Callable[[], dict[str, int]]  # of the partitions, as the most advanced node knows them
    fenced: Callable[[], frozenset[tuple[NodeId, Incarnation]]]  # processes that were ever fenced
    newest_level: int  # of all smq that the run has: after the heal every node runs it
    victim: NodeId  # of every fault that always strikes the same node, because only one disk may be ruined
    copies: list[DiskImage] = field(default_factory=list)  # of the victim's disk, oldest first


class Fault:
    """One strike in progress. It has its own randomness: without the strikes before it, it does the same."""

    def __init__(self, arena: Arena, spec: FaultSpec, rng: Random, stretch: float = 1.0) -> None:
        """`stretch`: the share of its duration that it lasts."""
        self.arena = arena
        self.spec = spec
        self.rng = rng
        self._stretch = stretch

    def lasting_ms(self) -> float:
        return self.rng.uniform(*self.spec.for_ms) * self._stretch

    def duration(self) -> Sleep:
        return Sleep(self.lasting_ms())

    def targets(self) -> list[NodeId]:
        """The nodes to strike this time; empty if there is none of the kind."""
        nodes = list(self.arena.world.nodes)
        raft_leader, leaders = self.arena.seen_leaders()
        match self.spec.target:
            case "any":
                return [self.rng.choice(nodes)]
            case "all":
                return nodes
            case "minority":
                return self.rng.sample(nodes, (len(nodes) - 1) // 2)
            case "majority":
                return self.rng.sample(nodes, len(nodes) // 2 + 1)
            case "raft_leader":
                return [raft_leader] if raft_leader is not None else []
            case "partition_leader":
                return [self.rng.choice(leaders)] if leaders else []
            case other:
                raise ValueError(f"unknown target {other!r} of fault {self.spec.what!r}")

    def note(self, what: str, **fields: Any) -> None:
        self.arena.world.recorder.note("fault", what=what, **fields)

    def others(self, node: NodeId) -> list[NodeId]:
        return [n for n in self.arena.world.nodes if n != node]

    def hosts(self) -> Iterator[SimHost]:
        for node in self.targets():
            yield self.arena.cluster.hosts[node]
