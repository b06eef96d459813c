"""The state that is back after restarts (the Recovery lines of the behaviour checklist)."""

import json
import shutil
import signal
import urllib.error
import urllib.request
from typing import Any

from smq.clients.pb import smq_pb2 as pb
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from smq.testing.node_process import run_cli, wait_for


def _publish(cluster: Cluster, topic: str, count: int) -> RawNode:
    leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
    for i in range(count):
        leader.publish_values(topic, 0, [b"%d" % i])
    return leader


def test_after_an_orderly_stop_of_all_the_next_offset_is_150(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    _publish(fault_cluster, topic, 150)
    _stop_all(fault_cluster)
    fault_cluster.restart(*fault_cluster.nodes)
    leader = fault_cluster.nodes[fault_cluster.wait_leader(topic, 0)].raw
    assert leader.publish_values(topic, 0, [b"next"]).base_offset == 150


def test_follower_reports_the_committed_hwm(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    _publish(fault_cluster, topic, 7)
    for node in fault_cluster.alive():
        info = node.raw.range_info(topic, 0)
        assert (info.hwm, info.lso) == (7, 7)


def test_all_that_was_there_is_there_after_a_kill_of_all(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic(2, config={"max.message.bytes": "5000"})
    leader = _publish(fault_cluster, topic, 50)
    leader.commit("g-recovered", topic, 0, 6)
    request = pb.DeleteRecordsRequest(topic=topic, partition=0, before_offset=4, timeout_ms=10_000)
    leader.call(leader.admin.DeleteRecords, request)
    before = _described(leader, topic)
    fault_cluster.kill(*fault_cluster.nodes)
    fault_cluster.restart(*fault_cluster.nodes)
    for node in fault_cluster.alive():
        assert _described(node.raw, topic) == before
        (found,) = node.raw.describe(topic, linearizable=True).topics
        assert dict(found.config) == {"max.message.bytes": "5000"}
        assert node.raw.committed("g-recovered", topic, 0) == 6
    leader = fault_cluster.nodes[fault_cluster.wait_leader(topic, 0)].raw
    assert leader.publish_values(topic, 0, [b"next"]).base_offset == 50
    fault_cluster.wait_converged(topic, 2)
    expected = {i: b"%d" % i for i in range(4, 50)} | {50: b"next"}
    assert all(node.raw.read_all(topic, 0, 4) == expected for node in fault_cluster.alive())
    fault_cluster.wait_digests_equal()


def _described(node: RawNode, topic: str) -> list[tuple[bytes, int, int, int, int]]:
    """The identity of each partition, and its ends."""
    infos = [node.range_info(topic, partition) for partition in range(2)]
    return [(info.topic_id, info.range_start, info.range_stop, info.log_start, info.hwm) for info in infos]


def test_commit_acknowledged_on_one_node_is_read_on_every_other(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    _publish(fault_cluster, topic, 20)
    nodes = [node.raw for node in fault_cluster.alive()]
    for offset in range(1, 19):
        nodes[offset % 3].commit("g-register", topic, 0, offset)
        assert [node.committed("g-register", topic, 0) for node in nodes] == [offset] * 3


def test_deleted_topic_is_gone_and_its_name_starts_again_at_0(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    leader = _publish(fault_cluster, topic, 5)
    leader.call(leader.admin.DeleteTopic, pb.DeleteTopicRequest(name=topic, timeout_ms=10_000))
    leader.create_topic(topic, 1)
    again = fault_cluster.nodes[fault_cluster.wait_leader(topic, 0)].raw
    assert again.range_info(topic, 0).hwm == 0
    assert again.publish_values(topic, 0, [b"new life"]).base_offset == 0
    fault_cluster.wait_converged(topic, 1)
    assert all(node.raw.read_all(topic, 0) == {0: b"new life"} for node in fault_cluster.alive())


def test_node_that_was_away_gets_all_that_it_missed(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    victim = next(node for node in fault_cluster.nodes if node != fault_cluster.wait_leader(topic, 0))
    fault_cluster.kill(victim)
    _publish(fault_cluster, topic, 100)
    fault_cluster.restart(victim)
    fault_cluster.wait_converged(topic, 1)
    assert fault_cluster.nodes[victim].raw.read_all(topic, 0) == {i: b"%d" % i for i in range(100)}


def test_copies_of_all_directories_made_while_stopped_are_a_backup(own_cluster: Cluster) -> None:
    """As docs/operations.md describes it."""
    own_cluster.start()
    topic = own_cluster.make_topic()
    _publish(own_cluster, topic, 20)
    copies = {}
    _stop_all(own_cluster)
    for node in own_cluster.nodes.values():
        copies[node.id] = node.data_dir.with_name("data.copy")
        shutil.copytree(node.data_dir, copies[node.id])
    own_cluster.restart(*own_cluster.nodes)
    _publish(own_cluster, topic, 5)
    _stop_all(own_cluster)
    for node in own_cluster.nodes.values():
        shutil.rmtree(node.data_dir)
        copies[node.id].rename(node.data_dir)
    own_cluster.restart(*own_cluster.nodes)
    own_cluster.wait_converged(topic, 1)
    expected = {i: b"%d" % i for i in range(20)}
    assert all(node.raw.read_all(topic, 0) == expected for node in own_cluster.alive())
    own_cluster.wait_digests_equal()


def test_two_empty_directories_of_three_form_no_cluster_and_everyone_says_so(own_cluster: Cluster) -> None:
    """They have been asked for a first start, too. What the third node has is still there once the others are back."""
    own_cluster.start()
    topic = own_cluster.make_topic()
    _publish(own_cluster, topic, 20)
    own_cluster.wait_converged(topic, 1)
    birth = _readyz(own_cluster, 3)["birth"]
    own_cluster.kill(*own_cluster.nodes)
    for node in (1, 2):
        own_cluster.nodes[node].data_dir.rename(own_cluster.nodes[node].data_dir.with_name("lost"))
    own_cluster.ask_first_start()
    own_cluster.restart(1, 2, wait=False)
    wait_for("node 1 waits", lambda: "nodes 3 are not connected" in _readyz(own_cluster, 1)["reason"])
    asked = run_cli("first-start", "--config", str(own_cluster.nodes[2].config), "--timeout", "1")
    assert (asked.returncode, "nodes 3 are not connected" in asked.stderr) == (1, True)
    own_cluster.restart(3, wait=False)

    def all_say_so() -> bool:
        said = [_readyz(own_cluster, node) for node in own_cluster.nodes]
        return all(one["birth"] == birth and "2 of 3 nodes run on disks" in str(one["warnings"]) for one in said)

    wait_for("all are of one birth, and say that too few disks are left", all_say_so)
    status = run_cli("status", "--bootstrap", own_cluster.nodes[3].grpc)
    assert (status.returncode, "no majority is left" in status.stdout) == (1, True)
    assert not any(node.raw.status().is_ready for node in own_cluster.alive())

    own_cluster.kill(*own_cluster.nodes)
    for node in (1, 2):
        shutil.rmtree(own_cluster.nodes[node].data_dir)
        own_cluster.nodes[node].data_dir.with_name("lost").rename(own_cluster.nodes[node].data_dir)
    own_cluster.restart(*own_cluster.nodes)
    own_cluster.wait_converged(topic, 1)
    assert own_cluster.nodes[3].raw.read_all(topic, 0) == {i: b"%d" % i for i in range(20)}
    own_cluster.wait_digests_equal()


def _readyz(cluster: Cluster, node: int) -> dict[str, Any]:
    """The body, whatever the status."""
    request = urllib.request.Request(f"http://{cluster.nodes[node].http}/readyz")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            text = answer.read()
    except urllib.error.HTTPError as refused:
        text = refused.read()
    except OSError:
        text = b'{"reason": "", "birth": "", "warnings": []}'
    found: dict[str, Any] = json.loads(text)
    return found


def _stop_all(cluster: Cluster) -> None:
    """SIGTERM, as an operator does it."""
    for node in cluster.nodes:
        cluster.signal(node, signal.SIGTERM)
    for node in cluster.nodes:
        cluster.wait_dead(node)
