"""Strikes that choose their moment by the current leaders, to reach states that chance alone seldom meets.

Owns elections on stale reports, high water mark proposals that arrive an epoch late, restarts with the applied state
behind the log, and leaders that die with an unsynced tail.
"""

from chaos_tests.sim.faults.catalogue import Fault
from chaos_tests.sim.rpc import Script, Sleep
from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel


def stale_return(fault: Fault) -> Script:
    """A partition leader cannot send CONTROL to the others, then sleeps until another epoch has begun. Its proposals
    and acknowledgements arrive right afterwards; then it wakes with producers waiting."""
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
    """A node restarts and receives no Raft messages for a while. Its log may be of an epoch not applied yet."""
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
    """A partition's leader dies with appends that are on the followers but not on its own slow disk, and is back before
    any node has noticed (rule 2). It may come back mute: it receives Raft messages and serves its partitions' DATA, but
    the others learn of its new process only later, together with everything that it proposed in the meantime."""
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
    """The Raft leader commits with one follower while its own disk is stalled, dies, and comes back with the others
    while that follower is cut off: entries are lost if the leader's unsynced copy was counted."""
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


def passed_by(fault: Fault) -> Script:
    """A follower is away while log starts move past its end. Soon after it is back a leader dies, with retries under
    way: the newly elected node must know the producers of deleted records (rule 16)."""
    cluster, pace = fault.arena.cluster, fault.arena.world.pace
    node = fault.rng.choice(fault.arena.world.nodes)
    cluster.crash(node, power=fault.rng.random() < 0.5, why="passed-by")
    for _ in range(fault.rng.randint(1, 4)):
        pace.rush()
        yield Sleep(150)
    cluster.start(node)
    yield Sleep(fault.rng.uniform(100, 500))
    pace.rush()
    yield Sleep(fault.rng.uniform(5, 60))
    _, leaders = fault.arena.seen_leaders()
    leaders = [leader for leader in leaders if leader != node]
    if leaders:
        leader = fault.rng.choice(leaders)
        cluster.crash(leader, power=fault.rng.random() < 0.5, why="passed-by")
        pace.rush()
        cluster.start_later(leader, fault.lasting_ms())
    yield fault.duration()


def unsynced(fault: Fault) -> Script:
    """A leader and one follower write to stalled disks, no other node receives the records, and Raft's majority works.
    Then all nodes lose power. A record that the two had counted before it was on their disks is lost (P1, rule 7)."""
    cluster, network = fault.arena.cluster, fault.arena.cluster.network
    _, leaders = fault.arena.seen_leaders()
    if not leaders:
        return
    leader = fault.rng.choice(leaders)
    others = fault.others(leader)
    partner = fault.rng.choice(others)
    deaf = [node for node in others if node != partner]
    fault.note("unsynced", leader=leader, partner=partner)
    for node in (leader, partner):
        disk = cluster.hosts[node].disk
        if disk is not None:
            disk.stall(500)
    for node in deaf:
        network.stall(leader, node, Channel.DATA)
    fault.arena.world.pace.rush()
    yield Sleep(fault.rng.uniform(20, 250))
    for host in cluster.up():
        cluster.crash(host.node, power=True, why="unsynced")
    for node in deaf:
        network.unstall(leader, node, Channel.DATA)
    for node in fault.arena.world.nodes:
        cluster.start_later(node, fault.lasting_ms())
    yield fault.duration()
