"""Strikes on processes, network, disks and clocks.

Owns the plain strikes and the table of all strikes, those of `steered` included. Each is a script that
strikes once, lasts a while, and undoes its fault; `heal` of the storm undoes the faults that are left when the run
ends in between.
"""

from collections.abc import Callable
from typing import Final

from chaos_tests.crash.flips import flipped, is_refused_as_foreign
from chaos_tests.sim.clients.base import Known
from chaos_tests.sim.clients.consumer import Consumer
from chaos_tests.sim.clients.producer import Producer
from chaos_tests.sim.cluster import SimHost
from chaos_tests.sim.faults import steered, upgrades
from chaos_tests.sim.faults.catalogue import Fault
from chaos_tests.sim.rpc import Script, Sleep
from smq.raft_state.commands import SetNodeDrained
from smq.raft_state.ids import NodeId, RequestId
from smq.replication.api import Acks
from smq.replication.net.disk_marks import MARKS, Mark
from smq.replication.nodes.identity import DISK_KEY
from smq.replication.ports import Channel, Table
from smq.replication.raft.journal import MARKS_KEY, is_whole_row, parse_meta
from smq.testing.virtual.clock import NS_PER_MS, Process
from smq.testing.virtual.disk import DiskImage, FakeDisk

TERMINATE_MS = 2_000
COPIES_KEPT = 8  # of the victim's disk
HUNG_RECOVERED_MS: Final = 6_000.0  # three times `disk_hang_ms`: it is noticed, leaderships move, clients find them
HUNG_FIRST_READS_MAX: Final = 4  # of the first probe: it is over before a leadership moves
HUNG_READS_MAX: Final = 20
OVERSLEPT_MS_MAX: Final = 100.0  # of one node more than another: far below a session timeout
OVERSLEPT_SEEN_MS: Final = 1_000.0  # a fence is proposed and applied by then
HUNG_PAUSE_MS: Final = 50.0  # between two reads of a probe; a read waits up to 150 ms


# ---------------------------------------------------------------------------------------------- processes
def crash(fault: Fault) -> Script:
    nodes = fault.targets()
    power = bool(fault.spec.options.get("power", False))
    for node in nodes:
        fault.arena.cluster.crash(node, power=power, why=fault.spec.target)
    for node in nodes:
        fault.arena.cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()


def crash_at_step(fault: Fault) -> Script:
    """A process dies right after one of its next few callbacks."""
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
            cluster.start_later(host.node, fault.lasting_ms())
            return True

        process.on_step = step
    yield fault.duration()


def terminate(fault: Fault) -> Script:
    """SIGTERM: the node hands over, stops (unless it dies earlier), and comes back."""
    cluster = fault.arena.cluster
    for host in fault.hosts():
        if host.api is None:
            continue
        process, back_ms = host.process, fault.lasting_ms()

        def end(host: SimHost = host, process: Process | None = process, back_ms: float = back_ms) -> None:
            if host.process is process and host.api is not None:
                host.api.stop()
                cluster.crash(host.node, power=False, why="terminated")
                cluster.start_later(host.node, back_ms)

        def ended(end: Callable[[], None] = end) -> None:
            cluster.scheduler.after_ms(0, end)  # from outside the process that ends

        fault.note("terminate", n=host.node)
        host.api.drain(TERMINATE_MS, ended)
    yield fault.duration()


def drain(fault: Fault) -> Script:
    """An operator drains a node and undrains it later, through any node that answers."""
    for node in fault.targets():
        try:
            _set_drained(fault, node, drained=True)
            yield fault.duration()
        finally:  # even if the storm ends in between
            _set_drained(fault, node, drained=False)
        yield fault.duration()


def _set_drained(fault: Fault, node: NodeId, *, drained: bool) -> None:
    command = SetNodeDrained(request_id=RequestId(fault.rng.randbytes(16)), node=node, drained=drained)
    reached = fault.arena.cluster.hosts[fault.rng.choice(list(fault.arena.world.nodes))]
    fault.note("drain", n=node, drained=drained)
    if reached.api is not None:
        reached.api.propose(command, TERMINATE_MS, lambda _reply: None)


def elect(fault: Fault) -> Script:
    """An operator asks any node for the preferred leaders of all partitions."""
    world = fault.arena.world
    node = fault.rng.choice(list(world.nodes))
    reached = fault.arena.cluster.hosts[node]
    fault.note("elect", n=node)
    if reached.api is not None:
        for known in world.partitions:
            reached.api.request_preferred_leader(known.pid)
    yield fault.duration()


def pause(fault: Fault) -> Script:
    nodes = fault.targets()
    for node in nodes:
        fault.arena.cluster.pause(node)
    yield fault.duration()
    for node in nodes:
        fault.arena.cluster.resume(node)


def oversleep(fault: Fault) -> Script:
    """No node gets a processor for longer than a session timeout, and some for a little longer than others. None is
    silent while another runs, so none may be fenced: for scenarios without any other fault."""
    cluster, nodes, was_fenced = fault.arena.cluster, list(fault.arena.world.nodes), fault.arena.fenced()
    lasting_ms = fault.lasting_ms()
    for node in nodes:
        cluster.pause(node)
    yield Sleep(lasting_ms)
    fault.rng.shuffle(nodes)
    for node in nodes:
        cluster.resume(node)
        yield Sleep(fault.rng.uniform(0, OVERSLEPT_MS_MAX))
    yield Sleep(OVERSLEPT_SEEN_MS)
    fenced = sorted(node for node, _ in fault.arena.fenced() - was_fenced)
    why = f"nodes {fenced} were fenced although all nodes merely slept {lasting_ms:.0f} ms"
    fault.arena.world.recorder.note("progress", ok=not fenced, why=why)


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
    """Breaks sessions; messages in flight may be lost."""
    network = fault.arena.cluster.network
    for node in fault.targets():
        for peer in fault.others(node):
            for channel in Channel:
                if fault.rng.random() < 0.6:
                    key = (min(node, peer), max(node, peer), channel)
                    network.break_session(key, drop_in_flight=fault.rng.random() < 0.7)
        fault.note("reset", n=node)
    yield fault.duration()


def _some_links(fault: Fault) -> list[tuple[NodeId, NodeId]]:
    """Between its targets and all others, each in one direction."""
    pairs = [(node, peer) for node in fault.targets() for peer in fault.others(node)]
    return [pair if fault.rng.random() < 0.5 else (pair[1], pair[0]) for pair in pairs]


def slow_link(fault: Fault) -> Script:
    network, factor = fault.arena.cluster.network, float(fault.spec.options.get("factor", 50.0))
    pairs = _some_links(fault)
    fault.note("slow-link", pairs=pairs, factor=factor)
    for src, dst in pairs:
        network.slow(src, dst, factor)
    yield fault.duration()
    for src, dst in pairs:
        network.slow(src, dst, 1.0)


def damaged_link(fault: Fault) -> Script:
    """A cable or a switch flips bits that TCP's checksum does not notice."""
    network, chance = fault.arena.cluster.network, fault.rng.uniform(*fault.spec.options["chance"])
    pairs = _some_links(fault)
    fault.note("damaged-link", pairs=pairs, chance=chance)
    for src, dst in pairs:
        network.damage(src, dst, chance)
    yield fault.duration()
    for src, dst in pairs:
        network.damage(src, dst, 0.0)


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
    yield from _stalled(fault, "slow-disk", FakeDisk.stall)


def slow_reads(fault: Fault) -> Script:
    """Reads that are not answered from memory take as long as this lasts. Nothing else may wait for them."""
    yield from _stalled(fault, "slow-reads", FakeDisk.stall_reads)


def _stalled(fault: Fault, what: str, stall: Callable[[FakeDisk, float], None]) -> Script:
    for host in fault.hosts():
        if host.disk is not None:
            ms = fault.lasting_ms()
            fault.note(what, n=host.node, ms=ms)
            stall(host.disk, ms)
    yield fault.duration()


def read_error(fault: Fault) -> Script:
    """The medium cannot give some batches any more, until they are written again, while the node runs. It is always the
    same node, because the others must have them."""
    host = fault.arena.cluster.hosts[fault.arena.victim]
    for _ in range(fault.rng.randint(1, 3)):
        key = host.image.make_unreadable(Table.BATCHES, fault.rng)
        fault.note("read-error", n=host.node, key=key.hex() if key is not None else None)
    yield fault.duration()


def misplaced(fault: Fault) -> Script:
    """A row of one partition names the pages of another partition's batch with the same base offset, while the node
    runs. It is always the same node."""
    host = fault.arena.cluster.hosts[fault.arena.victim]
    key = host.image.misplace(Table.BATCHES, fault.rng)
    fault.note("misplaced", n=host.node, key=key.hex() if key is not None else None)
    yield fault.duration()


def disk_error(fault: Fault) -> Script:
    """The next commit fails: the process must end itself, and must not have sent any message that waited for it."""
    for host in fault.hosts():
        if host.disk is not None:
            fault.note("disk-error", n=host.node)
            host.disk.fail_next_commit(OSError(5, "simulated I/O error"))
    yield fault.duration()


def fill_disk(fault: Fault) -> Script:
    """Another program fills a disk up to the node's reserve, or into it, and frees it later. No commit may fail."""
    hosts = list(fault.hosts())
    for host in hosts:
        free = int(fault.rng.uniform(*fault.spec.options["room"]))
        fault.note("fill-disk", n=host.node, free=free)
        host.limit(host.image.size_bytes() + free)
    yield from _freed(fault, hosts, "fill-disk-heal")


def disk_full(fault: Fault) -> Script:
    """The disk is full, including the node's reserve: commits fail, the process must end itself at every start, and
    once there is space again nothing may be missing."""
    hosts = list(fault.hosts())
    for host in hosts:
        fault.note("disk-full", n=host.node)
        host.limit(0)
    yield from _freed(fault, hosts, "disk-has-space")


def _freed(fault: Fault, hosts: list[SimHost], what: str) -> Script:
    yield fault.duration()
    for host in hosts:
        fault.note(what, n=host.node)
        host.limit(None)


def rot(fault: Fault) -> Script:
    """Bits of stored batches, or of the rows beside them, flip while their node is down. It is always the same node:
    with one damaged disk and healthy others, nothing may be lost, served wrong, or stuck."""
    node = fault.arena.victim
    host = fault.arena.cluster.hosts[node]
    fault.arena.cluster.crash(node, power=fault.rng.random() < 0.5, why="rot")
    table = Table[fault.rng.choice(fault.spec.options.get("tables", ["BATCHES"]))]
    for _ in range(fault.rng.randint(1, 3)):
        key = host.image.flip_bit(table, fault.rng)
        fault.note("rot", n=node, table=table.name, key=key.hex() if key is not None else None)
    fault.arena.cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()


def flip_file(fault: Fault) -> Script:
    """Bits anywhere in a node's LMDB file flip while it is down. If the node refuses to start, the operator follows its
    message: an empty directory (rule 18). It is always the same node."""
    cluster, node = fault.arena.cluster, fault.arena.victim
    host = cluster.hosts[node]
    cluster.crash(node, power=fault.rng.random() < 0.5, why="flip-file")
    found, outcome = flipped(host.image, fault.rng)
    if found is not None and is_refused_as_foreign(found, cluster.configs[node]):
        found, outcome = None, f"{outcome}, refused as another node's"
    host.image = found if found is not None else DiskImage()
    fault.note("flip-file", n=node, outcome=outcome)
    cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()


def wipe(fault: Fault) -> Script:
    """A node's disk is replaced by an empty one while it is down (rule 18). It is always the same node, so that a
    majority of the disks survives."""
    cluster, node = fault.arena.cluster, fault.arena.victim
    cluster.crash(node, power=fault.rng.random() < 0.5, why="wipe")
    cluster.hosts[node].image = DiskImage()
    fault.note("wipe", n=node)
    cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()


def emptied(fault: Fault) -> Script:
    """A majority of the nodes comes back with empty disks while the others are away, and then with them. All are asked
    for a first start, as by an option that was never removed. No cluster may begin: there is more than they know (rule
    18). Then the operator finds the disks."""
    cluster, world = fault.arena.cluster, fault.arena.world
    victims = fault.rng.sample(list(world.nodes), len(world.nodes) // 2 + 1)
    fault.note("emptied", nodes=victims)
    for node in world.nodes:
        cluster.crash(node, power=fault.rng.random() < 0.5, why="emptied")
    kept = {node: cluster.hosts[node].image for node in victims}
    for node in victims:
        cluster.hosts[node].image = DiskImage()
    try:
        for back in (victims, list(world.nodes)):
            for node in back:
                cluster.start(node)
            yield fault.duration()
            ready = [host.node for host in cluster.up() if host.node in victims and host.api and host.api.is_ready]
            why = f"nodes {ready} are ready on empty disks, without a majority that knows anything"
            world.recorder.note("progress", ok=not ready, why=why)
    finally:
        for node in victims:
            cluster.crash(node, power=False, why="emptied")
            cluster.hosts[node].image = kept[node]
            cluster.start_later(node, 0)


def restored_disk(fault: Fault) -> Script:
    """A node's disk is restored from an old copy while it is down (rule 18). It is always the same node. The copy was
    made at an earlier strike, and every other disk knows that it is old: no node could recognise a younger one."""
    cluster, node, copies = fault.arena.cluster, fault.arena.victim, fault.arena.copies
    old = [copy for copy in copies if _is_known_as_old(fault, copy)]
    copies.append(cluster.hosts[node].image.copy())
    del copies[:-COPIES_KEPT]
    if old:
        cluster.crash(node, power=fault.rng.random() < 0.5, why="restored-disk")
        cluster.hosts[node].image = fault.rng.choice(old).copy()
        fault.note("restored-disk", n=node)
        cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()


def _is_known_as_old(fault: Fault, copy: DiskImage) -> bool:
    disk, (writes, _) = copy.tables[Table.META].get(DISK_KEY), _marks_on(copy)
    others = [_marks_on(fault.arena.cluster.hosts[node].image)[1] for node in fault.others(fault.arena.victim)]
    return all(any(mark.disk == disk and mark.writes > writes for mark in marks) for marks in others)


def _marks_on(image: DiskImage) -> tuple[int, tuple[Mark, ...]]:
    row = image.tables[Table.RAFT_META].get(MARKS_KEY)
    if row is None or not is_whole_row(MARKS_KEY, row):
        return 0, ()
    writes, marks = parse_meta(MARKS_KEY, row)
    return writes, MARKS.unpack(marks)


def clock_jump(fault: Fault) -> Script:
    low, high = fault.spec.options.get("jump_ms", [-20_000, 20_000])
    for host in fault.hosts():
        ms = fault.rng.uniform(low, high)
        fault.note("clock-jump", n=host.node, ms=ms)
        host.machine.wall_offset_ns += int(ms * NS_PER_MS)
    yield fault.duration()


def hung_disk(fault: Fault) -> Script:
    """One node's disk hangs: no commit ends for tens of seconds, and none fails. Partitions are probed while it does,
    one of those that it leads immediately: records are taken and served, if need be from memory, because a majority of
    the disks writes. After a bound, no partition depends on the hung disk any more. A check after the heal would find
    nothing, because every queued commit ends then."""
    hosts = [host for host in fault.hosts() if host.disk is not None]
    lasting_ms = max(fault.lasting_ms(), HUNG_RECOVERED_MS)
    for host in hosts:
        assert host.disk is not None
        fault.note("hung-disk", n=host.node, ms=lasting_ms)
        host.disk.stall(lasting_ms * 2)  # until the probe is over, however long it takes
    if not hosts:
        return
    _, leaders = fault.arena.seen_leaders()
    partitions = [known for known in fault.arena.world.partitions if not known.dropped]
    led = [known for known, leader in zip(partitions, leaders, strict=False) if leader in {h.node for h in hosts}]
    if led:
        yield from _probe(fault, led[0], HUNG_FIRST_READS_MAX)
    yield Sleep(HUNG_RECOVERED_MS)
    for known in partitions:
        yield from _probe(fault, known, HUNG_READS_MAX)
    yield Sleep(lasting_ms - HUNG_RECOVERED_MS)
    _demand_others_lead(fault, {host.node for host in hosts})
    for host in hosts:
        if host.disk is not None:
            fault.note("hung-disk-heal", n=host.node)
            host.disk.end_stall()
    yield Sleep(HUNG_RECOVERED_MS)


def _demand_others_lead(fault: Fault, hung: set[NodeId]) -> None:
    """Every partition has taken a record meanwhile, so each has had a reason to move, and none to come back."""
    raft_leader, leaders = fault.arena.seen_leaders()
    led = sum(leader in hung for leader in leaders)
    why = f"nodes {sorted(hung)} lead {led} partitions on disks that hang; node {raft_leader} leads Raft"
    fault.arena.world.recorder.note("progress", ok=not led and raft_leader not in hung, why=why)


def _probe(fault: Fault, known: Known, reads_max: int) -> Script:
    """A record is acknowledged, and the leader serves it."""
    world, name = fault.arena.world, f"hung-disk/{fault.rng.getrandbits(32)}"
    producer = Producer(world, name, acks=Acks.ALL, idempotent=True, think_ms=0)
    before = known.hwm
    yield from producer.send(known)
    if known.hwm == before or known.leader is None:
        world.recorder.note("progress", ok=False, why=f"no record was acknowledged in {known.key}")
        return
    end, node = known.hwm, known.leader
    reader, position = Consumer(world, f"{name}/reader", think_ms=0), max(before, known.lo)
    for _ in range(reads_max):
        position = yield from reader.poll(known, node, position)
        if position >= end:
            break
        yield Sleep(HUNG_PAUSE_MS)
    is_read = position >= end
    why = f"{known.key}: node {node} acknowledged records below {end}, and served none from {position} on"
    world.recorder.note("progress", ok=is_read, why=known.key if is_read else why)


STRIKES: dict[str, Callable[[Fault], Script]] = {
    strike.__name__: strike
    for strike in (
        crash,
        crash_at_step,
        terminate,
        drain,
        elect,
        pause,
        oversleep,
        partition,
        reset,
        slow_link,
        damaged_link,
        stall,
        slow_disk,
        hung_disk,
        slow_reads,
        read_error,
        misplaced,
        disk_error,
        fill_disk,
        disk_full,
        clock_jump,
        rot,
        flip_file,
        wipe,
        emptied,
        restored_disk,
        steered.stale_return,
        steered.behind_log,
        steered.passed_by,
        steered.quick_restart,
        steered.raft_minority,
        steered.unsynced,
        upgrades.upgrade,
        upgrades.downgrade,
    )
}
