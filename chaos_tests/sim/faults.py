"""The faults a scenario can name, each a script that strikes again and again until the run heals.

Owns how a fault is chosen, struck and ended. A fault knows the cluster and the network from outside; the steered
ones look at who leads what. It must leave nothing behind that `heal` does not undo.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_tests.sim.clients.base import World
from chaos_tests.sim.clock import NS_PER_MS
from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.disk import DiskImage
from chaos_tests.sim.rpc import ClientNet, Script, Sleep
from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel, Table

LEAD_MS_MAX = 100.0  # clients hurry this long before a fault strikes, so that it meets work under way


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One `[[fault]]` of a scenario: what, to whom, how often, for how long (milliseconds, uniform)."""

    what: str
    target: str = "any"
    every_ms: tuple[float, float] = (1000.0, 4000.0)
    for_ms: tuple[float, float] = (100.0, 1500.0)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Arena:
    """What faults act on."""

    cluster: Cluster
    world: World
    clients: ClientNet
    seen_leaders: Callable[[], tuple[NodeId | None, list[NodeId]]]  # Raft's, and the partitions'
    epochs: Callable[[], dict[str, int]]  # of the partitions, as the most advanced node knows them


class Fault:
    """One fault of a scenario at work."""

    def __init__(self, arena: Arena, spec: FaultSpec, name: str) -> None:
        self.arena = arena
        self.spec = spec
        self.rng: Random = arena.world.streams.stream(f"fault/{name}")
        self.victim = arena.world.streams.stream("fault/victim").choice(arena.world.nodes)  # for faults of one node

    def run(self) -> Script:
        strike = STRIKES[self.spec.what]
        while True:
            yield Sleep(self.rng.uniform(*self.spec.every_ms))
            self.arena.world.pace.rush()
            yield Sleep(self.rng.uniform(0, LEAD_MS_MAX))
            if self.arena.world.stopped:
                return
            self.arena.world.pace.rush()
            yield from strike(self)

    def duration(self) -> Sleep:
        return Sleep(self.rng.uniform(*self.spec.for_ms))

    def targets(self) -> list[NodeId]:
        """The nodes struck this time; empty where there is none of the kind."""
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


# ---------------------------------------------------------------------------------------------- processes
def crash(fault: Fault) -> Script:
    nodes = fault.targets()
    power = bool(fault.spec.options.get("power", False))
    for node in nodes:
        fault.arena.cluster.crash(node, power=power, why=fault.spec.target)
    for node in nodes:
        fault.arena.cluster.start_later(node, fault.rng.uniform(*fault.spec.for_ms))
    yield fault.duration()


def crash_at_step(fault: Fault) -> Script:
    """Dies right after one of its next few callbacks, wherever that falls."""
    cluster = fault.arena.cluster
    for host in fault.hosts():
        process = host.process
        if process is None or process.on_step is not None:
            continue
        left = [fault.rng.randint(1, 400)]

        def step(host: SimHost = host, left: list[int] = left) -> bool:
            left[0] -= 1
            if left[0]:
                return False
            cluster.crash(host.node, power=bool(fault.spec.options.get("power", False)), why="at a step")
            cluster.start_later(host.node, fault.rng.uniform(*fault.spec.for_ms))
            return True

        process.on_step = step
    yield fault.duration()


def pause(fault: Fault) -> Script:
    nodes = fault.targets()
    for node in nodes:
        fault.arena.cluster.pause(node)
    yield fault.duration()
    for node in nodes:
        fault.arena.cluster.resume(node)


# ---------------------------------------------------------------------------------------------- network
def partition(fault: Fault) -> Script:
    """Cuts links by shape: isolate (one node from all), split (two halves), one_way, bridge (a-b only through c),
    link (one pair), ring (each node hears one neighbour only)."""
    nodes = list(fault.arena.world.nodes)
    shape = fault.rng.choice(fault.spec.options.get("shapes", ["isolate", "split", "one_way", "bridge", "link"]))
    cuts = _cuts(fault, shape, nodes)
    clients_too = fault.rng.random() < 0.5
    victim = cuts[0][0] if cuts else nodes[0]
    network = fault.arena.cluster.network
    fault.note("partition", shape=shape, cuts=cuts, clients=victim if clients_too else None)
    for src, dst in cuts:
        network.cut(src, dst)
    if clients_too and shape == "isolate":
        link = fault.arena.clients.links[victim]
        if fault.rng.random() < 0.5:
            link.requests_cut = True
        link.responses_cut = True
    yield fault.duration()
    fault.note("partition-heal", shape=shape)
    for src, dst in cuts:
        network.heal(src, dst)
    link = fault.arena.clients.links[victim]
    link.requests_cut = link.responses_cut = False


def _cuts(fault: Fault, shape: str, nodes: list[NodeId]) -> list[tuple[NodeId, NodeId]]:
    targets = fault.targets()
    first = targets[0] if targets else fault.rng.choice(nodes)
    rest = fault.others(first)
    match shape:
        case "isolate":
            return [(first, n) for n in rest] + [(n, first) for n in rest]
        case "split":
            fault.rng.shuffle(nodes)
            left, right = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
            return [pair for a in left for b in right for pair in ((a, b), (b, a))]
        case "one_way":
            outward = fault.rng.random() < 0.5
            return [(first, n) if outward else (n, first) for n in rest]
        case "bridge" | "link":
            other = fault.rng.choice(rest)
            return [(first, other), (other, first)]
        case "link_one_way":
            return [(first, fault.rng.choice(rest))]
        case "ring":
            return [(a, b) for i, a in enumerate(nodes) for b in nodes if b not in (a, nodes[(i + 1) % len(nodes)])]
        case other_shape:
            raise ValueError(f"unknown shape {other_shape!r} of a partition")


def reset(fault: Fault) -> Script:
    """Breaks sessions; what was in flight is lost or not."""
    network = fault.arena.cluster.network
    for node in fault.targets():
        for peer in fault.others(node):
            for channel in Channel:
                if fault.rng.random() < 0.6:
                    key = (min(node, peer), max(node, peer), channel)
                    network.break_session(key, drop_in_flight=fault.rng.random() < 0.7)
        fault.note("reset", n=node)
    yield fault.duration()


def slow_link(fault: Fault) -> Script:
    network, factor = fault.arena.cluster.network, float(fault.spec.options.get("factor", 50.0))
    pairs = [(node, peer) for node in fault.targets() for peer in fault.others(node)]
    pairs = [pair if fault.rng.random() < 0.5 else (pair[1], pair[0]) for pair in pairs]
    fault.note("slow-link", pairs=pairs, factor=factor)
    for src, dst in pairs:
        network.slow(src, dst, factor)
    yield fault.duration()
    for src, dst in pairs:
        network.slow(src, dst, 1.0)


def stall(fault: Fault) -> Script:
    """Holds back one channel of some links: elections see stale reports, HWM proposals arrive an epoch late, a
    restarted node's applied state stays behind its log."""
    network = fault.arena.cluster.network
    channel = Channel[fault.spec.options.get("channel", "CONTROL")]
    inward = bool(fault.spec.options.get("inward", fault.rng.random() < 0.5))
    held: list[tuple[NodeId, NodeId]] = []
    for node in fault.targets():
        for peer in fault.others(node):
            if fault.rng.random() < 0.7:
                held.append((peer, node) if inward else (node, peer))
    fault.note("stall", links=held, channel=channel.name)
    for src, dst in held:
        network.stall(src, dst, channel)
    yield fault.duration()
    for src, dst in held:
        network.unstall(src, dst, channel)


# ---------------------------------------------------------------------------------------------- disk, clock
def slow_disk(fault: Fault) -> Script:
    for host in fault.hosts():
        if host.disk is not None:
            ms = fault.rng.uniform(*fault.spec.for_ms)
            fault.note("slow-disk", n=host.node, ms=ms)
            host.disk.stall(ms)
    yield fault.duration()


def disk_error(fault: Fault) -> Script:
    """The next commit fails: the process must end itself, and nothing it was about to say may have been said."""
    for host in fault.hosts():
        if host.disk is not None:
            fault.note("disk-error", n=host.node)
            host.expected_death = True
            host.disk.fail_next_commit(OSError(5, "simulated I/O error"))
    yield fault.duration()


def rot(fault: Fault) -> Script:
    """Bits of stored batches, or of the rows beside them, flip while their node is down. Always the same node: with
    one disk rotten and the others whole, nothing may be lost, served wrong, or stuck."""
    node = fault.victim
    host = fault.arena.cluster.hosts[node]
    fault.arena.cluster.crash(node, power=fault.rng.random() < 0.5, why="rot")
    table = Table[fault.rng.choice(fault.spec.options.get("tables", ["BATCHES"]))]
    for _ in range(fault.rng.randint(1, 3)):
        key = host.image.flip_bit(table, fault.rng)
        fault.note("rot", n=node, table=table.name, key=key.hex() if key is not None else None)
    fault.arena.cluster.start_later(node, fault.rng.uniform(*fault.spec.for_ms))
    yield fault.duration()


def wipe(fault: Fault) -> Script:
    """A node's disk is replaced by an empty one while it is down (rule 18). Always the same node's: a majority of the
    disks survives."""
    cluster, node = fault.arena.cluster, fault.victim
    cluster.crash(node, power=fault.rng.random() < 0.5, why="wipe")
    cluster.hosts[node].image = DiskImage()
    fault.note("wipe", n=node)
    cluster.start_later(node, fault.rng.uniform(*fault.spec.for_ms))
    yield fault.duration()


def clock_jump(fault: Fault) -> Script:
    low, high = fault.spec.options.get("jump_ms", [-20_000, 20_000])
    for host in fault.hosts():
        ms = fault.rng.uniform(low, high)
        fault.note("clock-jump", n=host.node, ms=ms)
        host.machine.wall_offset_ns += int(ms * NS_PER_MS)
    yield fault.duration()


# ---------------------------------------------------------------------------------------------- steered
def stale_return(fault: Fault) -> Script:
    """A partition leader cannot reach the others' CONTROL, then sleeps until another epoch has begun: its proposals
    and acknowledgements arrive in the very next moment, and then it wakes with producers waiting."""
    node, epochs = _some_leader(fault)
    if node is None:
        return
    network = fault.arena.cluster.network
    for peer in fault.others(node):
        network.stall(node, peer, Channel.CONTROL)
    yield Sleep(fault.rng.uniform(0, 60))
    fault.arena.cluster.pause(node)
    for _ in range(400):
        yield Sleep(10)
        if fault.arena.epochs() != epochs:
            break
    yield Sleep(fault.rng.choice((0, 0, fault.rng.uniform(0, 40))))
    for peer in fault.others(node):
        network.unstall(node, peer, Channel.CONTROL)
    yield Sleep(fault.rng.choice((0, 0, fault.rng.uniform(0, 500))))
    fault.arena.cluster.resume(node)


def _some_leader(fault: Fault) -> tuple[NodeId | None, dict[str, int]]:
    _, leaders = fault.arena.seen_leaders()
    return (fault.rng.choice(leaders) if leaders else None), fault.arena.epochs()


def behind_log(fault: Fault) -> Script:
    """A node restarts and cannot hear Raft for a while, though its log may be of an epoch it has yet to apply."""
    node = fault.rng.choice(fault.arena.world.nodes)
    network = fault.arena.cluster.network
    fault.arena.cluster.crash(node, power=True, why="behind-log")
    for peer in fault.others(node):
        network.stall(peer, node, Channel.CONTROL)
    fault.arena.cluster.start(node)
    yield fault.duration()
    for peer in fault.others(node):
        network.unstall(peer, node, Channel.CONTROL)


def quick_restart(fault: Fault) -> Script:
    """A partition's leader dies with appends that the followers have and its own slow disk has not, and is back
    before anybody has noticed (rule 2). It may come back mute: it hears Raft and serves its partitions' DATA, but
    the others learn of its new process only later, together with whatever it proposed meanwhile."""
    _, leaders = fault.arena.seen_leaders()
    if not leaders:
        return
    node = fault.rng.choice(leaders)
    cluster, network = fault.arena.cluster, fault.arena.cluster.network
    disk, is_mute = cluster.hosts[node].disk, fault.rng.random() < 0.5
    if disk is not None and fault.rng.random() < 0.7:
        disk.stall(500)
        yield Sleep(fault.rng.uniform(5, 120))
    cluster.crash(node, power=fault.rng.random() < 0.5, why="quick-restart")
    if is_mute:
        for peer in fault.others(node):
            network.stall(node, peer, Channel.CONTROL)
    cluster.start_later(node, fault.rng.uniform(0, 20))
    yield fault.duration()
    if is_mute:
        yield Sleep(fault.rng.uniform(200, 1200))
        for peer in fault.others(node):
            network.unstall(node, peer, Channel.CONTROL)


def raft_minority(fault: Fault) -> Script:
    """The Raft leader commits with its disk asleep and one follower, dies, and comes back with the others while that
    follower is cut off: whoever counted the leader's unsynced entries has lost them."""
    cluster, network = fault.arena.cluster, fault.arena.cluster.network
    leader, _ = fault.arena.seen_leaders()
    disk = cluster.hosts[leader].disk if leader is not None else None
    if leader is None or disk is None:
        return
    others = fault.others(leader)
    fault.rng.shuffle(others)
    loyal, deaf = others[: (len(others) + 1) // 2], others[(len(others) + 1) // 2 :]
    fault.note("raft-minority", leader=leader, loyal=loyal, deaf=deaf)
    for peer in deaf:
        network.stall(leader, peer, Channel.CONTROL)
    disk.stall(400)
    yield Sleep(fault.rng.uniform(20, 250))
    cluster.crash(leader, power=False, why="raft-minority")
    cut = [pair for a in loyal for b in (leader, *deaf) for pair in ((a, b), (b, a))]
    for src, dst in cut:
        network.cut(src, dst)
    for peer in deaf:
        network.unstall(leader, peer, Channel.CONTROL)
    cluster.start(leader)
    yield fault.duration()
    for src, dst in cut:
        network.heal(src, dst)


STRIKES: dict[str, Callable[[Fault], Script]] = {
    strike.__name__: strike
    for strike in (
        crash,
        crash_at_step,
        pause,
        partition,
        reset,
        slow_link,
        stall,
        slow_disk,
        disk_error,
        clock_jump,
        rot,
        wipe,
        stale_return,
        behind_log,
        quick_restart,
        raft_minority,
    )
}


def heal(arena: Arena) -> None:
    """Undoes everything: links, pauses, dead nodes, slow clients."""
    arena.world.recorder.note("heal")
    arena.cluster.network.heal_all()
    arena.clients.heal()
    for host in arena.cluster.hosts.values():
        host.restart_wanted += 1
        if host.process is not None:
            host.process.on_step = None
        arena.cluster.resume(host.node)
        arena.cluster.start(host.node)
