"""A data directory put back from an old copy: real nodes recognize it, readmit it, and lose nothing."""

import shutil

from smq.testing.cluster import Cluster
from smq.testing.node_process import Node, wait_for
from tests.cluster.faults.store import opened


def _disk_id(node: Node) -> bytes | None:
    """Of a node that is stopped."""
    with opened(node.data_dir) as env:
        table = env.open_db(b"meta", create=False)
        with env.begin(db=table) as txn:
            return txn.get(b"disk_id")


def _warning(node: Node) -> str | None:
    return next((warning for warning in node.raw.status().warnings if "is an old copy" in warning), None)


def test_an_old_copy_and_a_node_that_was_cut_off_lose_nothing_and_the_copy_rejoins_as_a_replaced_disk(
    own_cluster: Cluster,
) -> None:
    """A and B acknowledge records that C does not get. Then A is down, and B comes back with an old copy: B and C are
    two of three, and neither has the records. They wait for A."""
    own_cluster.start()
    topic = own_cluster.make_topic()
    a = own_cluster.wait_leader(topic, 0)
    b, c = (node for node in own_cluster.nodes if node != a)
    victim, leader = own_cluster.nodes[b], own_cluster.nodes[a].raw
    copy = victim.data_dir.with_name("copy")
    own_cluster.kill(b)
    disk_id = _disk_id(victim)
    shutil.copytree(victim.data_dir, copy)
    own_cluster.restart(b)
    assert _warning(victim) is None, "a restart is no old copy"
    leader.publish_values(topic, 0, [b"all have it"])
    own_cluster.wait_converged(topic, 1)

    own_cluster.pause(c)
    wait_for("a Raft leader other than C", lambda: leader.status().raft_leader in {a, b})
    for i in range(1, 21):
        leader.publish_values(topic, 0, [b"acked-%d" % i])
    own_cluster.kill(a, b)
    shutil.rmtree(victim.data_dir)
    copy.rename(victim.data_dir)
    own_cluster.resume(c)
    own_cluster.restart(b, wait=False)
    warning = wait_for("the old copy is recognized", lambda: _warning(victim))
    assert "has no vote until the others let it in" in warning

    own_cluster.restart(a)
    own_cluster.wait_ready()
    own_cluster.wait_converged(topic, 1)  # until then a node may know an earlier mark only
    assert leader.read_all(topic, 0) == {0: b"all have it"} | {i: b"acked-%d" % i for i in range(1, 21)}
    assert "has rejoined as a replaced disk" in (_warning(victim) or "")
    own_cluster.kill(b)
    assert _disk_id(victim) != disk_id
