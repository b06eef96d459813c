"""The demo can fail: each of its comparisons, given data that differ."""

import json
from pathlib import Path

import pytest

from chaos_tests.demo.__main__ import _check_kills
from chaos_tests.demo.checks import Replica, SparkChecks, check_replicas, failover_seconds
from chaos_tests.demo.flights import load_flights, totals_by_carrier
from chaos_tests.demo.publish import Ack, DemoFailure, Kill, Published
from smq.testing.cluster import Cluster
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread
from smq.testing.node_process import Node
from tests.unit.spark_connector.support import records


def nodes_of(fake: FakeCluster) -> Cluster:
    """The demo's view of a fake cluster."""
    here = Path()
    found = {
        number: Node(id=number, config=here, data_dir=here, log=here, grpc=node.address, http="", kafka="")
        for number, node in fake.nodes.items()
    }
    return Cluster(here, len(found), nodes=found)


def published(rows: int) -> Published:
    return Published(partitions=[0] * rows, offsets=list(range(rows)))


def kill(**changes: object) -> Kill:
    values = {"node": 1, "at_s": 10.0, "acked_rows": 45, "in_flight_rows": 5, "led": {0: 3}, "leader_changes_before": 0}
    return Kill(**{**values, **changes})  # type: ignore[arg-type]  # fields by name


def copy(*epochs: tuple[int, int]) -> dict[int, Replica]:
    return {0: Replica(end=100, batches=3, size_bytes=1, digest="", epochs=list(epochs))}


def test_equal_replicas_agree() -> None:
    with cluster_in_thread(3, t=2) as fake:
        fake.append("t", 0, records(10))
        _, copies = check_replicas(nodes_of(fake), "t", 2, published(10))
    assert {partition: found.end for partition, found in copies.items()} == {0: 10, 1: 0}


def test_replica_with_other_bytes_is_found() -> None:
    with cluster_in_thread(3, t=1) as fake:
        fake.append("t", 0, records(10))
        fake.nodes[1].on_fetch = lambda part: setattr(part.batches[0], "ts_ns", 5)
        with pytest.raises(DemoFailure, match="the replicas differ"):
            check_replicas(nodes_of(fake), "t", 1, published(10))


def test_acknowledged_record_that_is_nowhere_is_found() -> None:
    with cluster_in_thread(3, t=1) as fake:
        fake.append("t", 0, records(10))
        with pytest.raises(DemoFailure, match="holds 10 records, 11 were acknowledged"):
            check_replicas(nodes_of(fake), "t", 1, published(11))


def test_hole_in_a_log_is_found() -> None:
    with cluster_in_thread(3, t=1) as fake:
        for first in (0, 10, 20):
            fake.append("t", 0, records(10, first=first))
        del fake.topics["t"][0].stored[1]
        with pytest.raises(DemoFailure, match="batch at 20, expected 10"):
            check_replicas(nodes_of(fake), "t", 1, published(30))


def test_failover_ends_with_the_first_acknowledgement_of_a_newer_epoch() -> None:
    run = published(100)
    # The second answer is the dead leader's own, read from the socket after it died.
    times = [(0, 49, 9.9), (50, 59, 10.001), (60, 69, 10.7), (70, 79, 10.9)]
    run.acks = [Ack(partition=0, first=first, last=last, at_s=at_s) for first, last, at_s in times]
    first, last = failover_seconds(kill(), run, copy((0, 3), (50, 3), (60, 4)))
    assert (round(first, 3), round(last, 3)) == (0.7, 0.7)


def test_kill_after_which_no_new_leader_wrote_is_no_failover() -> None:
    with pytest.raises(DemoFailure, match="no new leader wrote to a partition that node 1 had led"):
        failover_seconds(kill(), published(100), copy((0, 3)))


@pytest.mark.parametrize(
    ("changes", "leader_changes", "match"),
    [
        ({}, 0, "saw 0 leader changes"),
        ({"in_flight_rows": 0}, 1, "nothing in flight"),
        ({"acked_rows": 20}, 1, "killed at 20%"),
        ({"acked_rows": 70}, 1, "killed at 70%"),
    ],
)
def test_kill_that_was_not_hard_fails_the_demo(changes: dict[str, int], leader_changes: int, match: str) -> None:
    run = published(100)
    run.kills, run.leader_changes = [kill(**changes)], leader_changes
    with pytest.raises(DemoFailure, match=match):
        _check_kills(run, 1, 100)


def test_one_flight_less_makes_other_totals() -> None:
    flights = load_flights(1000)
    expected = totals_by_carrier(flights.frame)
    SparkChecks._compare("all", expected, totals_by_carrier(flights.frame))
    with pytest.raises(DemoFailure, match="differ"):
        SparkChecks._compare("all", totals_by_carrier(flights.frame.iloc[1:]), expected)


def test_values_are_the_rows_they_were_made_of() -> None:
    flights = load_flights(500)
    parsed = [json.loads(value) for value in flights.values]
    assert [row["distance"] for row in parsed] == flights.frame["distance"].tolist()
    assert set(parsed[0]) == set(flights.frame.columns)
    assert [key.decode() for key in flights.keys] == flights.frame["carrier"].tolist()
    assert len(flights.values) == len(flights.times_ms) == 500
