"""What the Raft leader says of Raft's voters: ends, times, and disks without a vote."""

from chaos_tests.sim.raft.group import Host, World
from smq.raft_state.ids import NodeId
from smq.replication.ports import Quorum, QuorumReplica
from smq.replication.raft.leader import Progress
from tests.unit.replication.raft.test_raft import calm, commit, elected, followers, isolate, wait
from tests.unit.replication.raft.test_replaced_disk import registered


def described(leader: Host) -> Quorum:
    found = leader.engine.quorum()
    assert found is not None
    return found


def voter(leader: Host, node: NodeId) -> QuorumReplica:
    return next(replica for replica in described(leader).voters if replica.node == node)


def now_ms(leader: Host) -> int:
    """Of the leader's wall clock, as the quorum has it."""
    return voter(leader, leader.node).caught_up_ms


def test_the_leader_knows_how_far_every_disk_is() -> None:
    world, leader, (a, b) = registered()
    commit(world, leader, "x")
    end = leader.engine.journal.last_index + 1
    wait(world, lambda: {replica.end for replica in described(leader).voters} == {end})
    found = described(leader)
    assert (found.leader, found.term, found.observers) == (leader.node, leader.engine.term, ())
    assert found.committed_end == leader.engine.commit_index + 1
    assert [(r.node, r.disk) for r in found.voters] == [(host.node, host.disk_id) for host in world.hosts.values()]
    assert voter(leader, leader.node).heard_ms == -1
    assert [host.engine.quorum() for host in (a, b)] == [None, None], "they do not lead"


def test_times_of_a_silent_follower_stand_still_and_its_end_stays_behind() -> None:
    world, leader, (silent, other) = registered()
    commit(world, leader, "x")
    world.run_ms(300)
    isolate(world, silent)
    world.run_ms(100)
    before = voter(leader, silent.node)
    commit(world, leader, "y")
    world.run_ms(1_000)
    found = {replica.node: replica for replica in described(leader).voters}
    assert found[other.node].end == leader.engine.journal.last_index + 1
    assert now_ms(leader) - found[other.node].caught_up_ms < 500
    assert now_ms(leader) - found[silent.node].caught_up_ms >= 900
    assert found[silent.node].heard_ms == before.heard_ms
    assert found[silent.node].end < found[other.node].end


def test_a_follower_that_follows_under_load_counts_as_caught_up() -> None:
    """It never has the newest entry at its answer, but always what was the newest at the answer before."""
    progress = Progress(next_index=1, heard_at=0.0)
    for n in range(1, 10):
        progress.match_index = 10 * n
        progress.note_end(float(n), last_index=10 * n + 10)
    assert progress.caught_up_at == 8.0
    progress.note_end(10.0, last_index=200)
    assert progress.caught_up_at == 8.0, "it has fallen behind"


def test_a_voter_that_never_answered_is_unknown() -> None:
    world = calm()
    isolate(world, world.hosts[NodeId(1)])
    wait(world, lambda: world.leader() is not None)
    leader = world.leader()
    assert leader is not None
    world.run_ms(300)
    found = voter(leader, NodeId(1))
    assert (found.end, found.heard_ms, found.caught_up_ms, found.disk) == (-1, -1, -1, b"")


def test_a_replaced_disk_observes_until_it_is_registered() -> None:
    world, leader, (a, _) = registered()
    old = a.disk_id
    a.crash(silently=False)
    a.replace_disk()
    a.start()
    end = leader.engine.journal.last_index + 1
    wait(world, lambda: [replica.end for replica in described(leader).observers] == [end])
    (observer,) = described(leader).observers
    assert (observer.node, observer.disk) == (a.node, a.disk_id)
    found = voter(leader, a.node)
    assert (found.disk, found.end) == (old, -1), "the vote is still that of the old disk"


def test_a_single_node_is_its_own_quorum() -> None:
    world: World = calm(1)
    leader = elected(world)
    assert [replica.node for replica in described(leader).voters] == [leader.node]
    assert followers(world, leader) == []
