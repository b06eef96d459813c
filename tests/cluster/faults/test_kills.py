"""SIGKILL under a running idempotent producer: whatever dies, every acknowledged record is on every replica afterwards.

The producer sends unique values with acks=all to two partitions all the while; `Traffic.verify` then reads every
replica raw and compares.
"""

import signal
from collections.abc import Iterator
from functools import partial

import pytest

from chaos_tests.live.load.traffic import Traffic
from smq.clients import SyncConsumer
from smq.records import CODECS, TIMESTAMP_TYPE_MASK, parse_header
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

PARTITIONS = 2


@pytest.fixture
def traffic(fault_cluster: Cluster) -> Iterator[Traffic]:
    """A producer that runs while the test breaks things; judged once everything is healed."""
    topic = fault_cluster.make_topic(PARTITIONS)
    with Traffic(fault_cluster, topic, PARTITIONS) as running:
        yield running
        running.wait_acks(5)  # it goes on after the heal
    running.verify()


def test_kill_of_the_partition_leader_loses_nothing_and_moves_leadership(
    fault_cluster: Cluster, traffic: Traffic
) -> None:
    victim = fault_cluster.wait_leader(traffic.topic, 0)
    fault_cluster.kill(victim)
    successor = fault_cluster.wait_leader(traffic.topic, 0, other_than=victim)
    traffic.wait_acks(10)  # while the victim is down
    assert successor in traffic.outcomes[0].leaders
    fault_cluster.restart(victim)


def test_batches_that_leaders_convert_survive_their_deaths(fault_cluster: Cluster) -> None:
    """The leader's time and another codec are stored once, and every replica has the same bytes."""
    topic = fault_cluster.make_topic(config={"compression.type": "zstd", "message.timestamp.type": "LogAppendTime"})
    with Traffic(fault_cluster, topic) as traffic:
        for _ in range(2):
            traffic.wait_acks(20)
            victim = fault_cluster.wait_leader(topic, 0)
            fault_cluster.kill(victim)
            fault_cluster.wait_leader(topic, 0, other_than=victim)
            traffic.wait_acks(10)
            fault_cluster.restart(victim)
        traffic.wait_acks(5)
    traffic.verify()
    with SyncConsumer(fault_cluster.nodes[1].grpc, from_replica=1) as consumer:
        headers = [parse_header(batch.data) for batch in consumer.fetch_range(topic, 0, 0).batches]
    assert {header.codec for header in headers} == {CODECS["zstd"]}
    assert all(header.attributes & TIMESTAMP_TYPE_MASK for header in headers)


def test_kill_of_a_follower_delays_no_client(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    with Traffic(fault_cluster, topic) as traffic:
        busy = {fault_cluster.wait_leader(topic, 0), fault_cluster.raft_leader()}
        victim = next(node for node in fault_cluster.nodes if node not in busy)
        fault_cluster.kill(victim)
        traffic.wait_acks(20)
        fault_cluster.restart(victim)
        traffic.wait_acks(5)
    traffic.verify()


def test_simultaneous_kill_of_all_three_loses_nothing(fault_cluster: Cluster, traffic: Traffic) -> None:
    fault_cluster.kill(1, 2, 3)
    fault_cluster.restart(1, 2, 3)
    traffic.wait_acks(10)


def test_kill_of_the_raft_leader_loses_nothing(fault_cluster: Cluster, traffic: Traffic) -> None:
    victim = fault_cluster.raft_leader()
    fault_cluster.kill(victim)
    assert fault_cluster.raft_leader() != victim
    traffic.wait_acks(10)
    fault_cluster.restart(victim)


def test_quick_restarts_of_a_leader_never_continue_its_old_epoch(fault_cluster: Cluster, traffic: Traffic) -> None:
    """Down and up again before it is fenced: the new process must not take over the old one's leaderships."""
    for _ in range(2):
        victim = fault_cluster.wait_leader(traffic.topic, 0)
        before = fault_cluster.partition(traffic.topic, 0)
        assert before is not None
        fault_cluster.kill(victim)
        fault_cluster.restart(victim, wait=False)
        traffic.wait_acks(3)
        # Linearizable: the first node that answers may be the restarted one, which has yet to hear what it missed.
        other = next(node.raw for node in fault_cluster.alive() if node.id != victim)
        (topic,) = wait_for("its epoch now", partial(other.describe, traffic.topic, linearizable=True)).topics
        assert topic.partitions[0].epoch > before.epoch
        fault_cluster.wait_ready(victim)


def test_kills_in_turn_while_others_come_back_lose_nothing(fault_cluster: Cluster, traffic: Traffic) -> None:
    for victim in (1, 2, 3):
        fault_cluster.kill(victim)
        traffic.wait_acks(3)
        fault_cluster.restart(victim)


def test_frozen_leader_that_wakes_up_commits_nothing_stale(fault_cluster: Cluster, traffic: Traffic) -> None:
    victim = fault_cluster.wait_leader(traffic.topic, 0)
    fault_cluster.signal(victim, signal.SIGSTOP)
    try:
        others = [node for node in fault_cluster.alive() if node.id != victim]

        def moved() -> bool:
            info = fault_cluster.partition(traffic.topic, 0, others)
            return info is not None and info.leader != victim and info.leader_available

        wait_for("another leader than the frozen one", moved)
    finally:
        fault_cluster.signal(victim, signal.SIGCONT)
    fault_cluster.wait_ready(victim)
    traffic.wait_acks(5)


def test_orderly_end_hands_leadership_over_and_exits_cleanly(fault_cluster: Cluster, traffic: Traffic) -> None:
    victim = fault_cluster.wait_leader(traffic.topic, 0)
    log = fault_cluster.end_on_purpose(victim, traffic.topic)
    assert "stopped" in log
    assert "Traceback" not in log
    traffic.wait_acks(5)
    fault_cluster.restart(victim)
