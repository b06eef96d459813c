"""`smq top`: rates from two looks, and a screen that stays true when nodes or the quorum are gone."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import (
    ClusterDescription,
    NodeDescription,
    NodeEvent,
    NodeStatus,
    ReplicaStatus,
    TransactionSummary,
)
from smq.coordinator.cli.commands.top import ASKED_AT_ONCE, GROUPS_MAX, Groups, Look, by_topic, rates, render
from smq.coordinator.cli.root import cli
from smq.coordinator.operators.time_line import Seen, merged
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread


def replica(topic: str, partition: int, hwm: int, *, is_leader: bool = True) -> ReplicaStatus:
    return ReplicaStatus(
        topic=topic,
        partition=partition,
        is_leader=is_leader,
        epoch=0,
        log_start=0,
        hwm=hwm,
        appended_end=hwm,
        durable_end=hwm,
        verified_end=hwm,
        size_bytes=hwm * 10,
    )


def look(at_s: float, *replicas: ReplicaStatus) -> Look:
    node = NodeDescription(
        node=1,
        grpc_address="h:1",
        http_address="",
        kafka_address="",
        fenced=False,
        incarnation=1,
        drained=False,
        rack="",
        feature_level=1,
    )
    status = NodeStatus(
        node=1,
        incarnation=1,
        is_ready=True,
        raft_leader=1,
        raft_term=3,
        applied_index=9,
        commit_index=9,
        digest="",
        replicas=replicas,
    )
    cluster = ClusterDescription(cluster_id="c", raft_leader=1, nodes=(node,), topics=(), feature_level=1)
    return Look(at_s=at_s, cluster=cluster, nodes={1: status}, groups=[], groups_left=0)


def test_rates_are_of_committed_records_between_two_looks() -> None:
    before = look(10.0, replica("t", 0, 100), replica("t", 1, 5), replica("u", 0, 7, is_leader=False))
    now = look(12.0, replica("t", 0, 150), replica("t", 1, 5), replica("u", 0, 9), replica("new", 0, 50))
    assert rates(now, before) == {("t", 0): 25.0, ("t", 1): 0.0}
    assert by_topic(rates(now, before)) == {"t": 25.0}


@pytest.mark.parametrize("before", [None, look(12.0, replica("t", 0, 0)), look(10.0, replica("t", 0, 900))])
def test_there_is_no_rate_without_an_earlier_look_or_for_a_topic_that_was_made_again(before: Look | None) -> None:
    assert rates(look(12.0, replica("t", 0, 150)), before) == {}


def shown(now: Look, before: Look | None = None) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(render(now, before, 3))
    return console.export_text()


def test_a_node_that_does_not_answer_and_a_lost_quorum_are_shown() -> None:
    now = replace(look(1.0), nodes={1: None}, groups=None)
    text = shown(now)
    assert "0 of 1 node ready" in text
    assert "no Raft leader: nothing can be written" in text
    assert "does not answer" in text
    assert "not known without a quorum" in text


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with cluster_in_thread(1, busy=1, idle=1) as found:
        yield found


@pytest.fixture
def smq(cluster: FakeCluster) -> Callable[..., Result]:
    environment = {"SMQ_BOOTSTRAP": cluster.nodes[1].address}
    return lambda *arguments: CliRunner(env=environment).invoke(cli, [str(a) for a in arguments])


def add_groups(cluster: FakeCluster, count: int) -> None:
    for n in range(count):
        cluster.groups[f"g{n:03}"] = pb.DescribeGroupResponse(
            group=pb.GroupSummary(group=f"g{n:03}", state="Stable", members=1),
            offsets=[pb.GroupOffset(topic="busy", partition=0, offset=0, hwm=n, lag=n, lag_bytes=n, lag_ms=n)],
        )


def asked(cluster: FakeCluster) -> list[str]:
    """The groups whose lag has been asked for, from here on."""
    names: list[str] = []

    def note(name: str, request: Any) -> None:
        if name == "DescribeGroup":
            names.append(request.group)

    cluster.nodes[1].hook = note
    return names


def test_one_look_asks_for_a_bounded_number_of_groups_and_counts_the_rest(
    cluster: FakeCluster, smq: Callable[..., Result]
) -> None:
    add_groups(cluster, GROUPS_MAX + 5)
    names = asked(cluster)
    result = smq("top", "--count", "1", "--rows", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.index("g049") < result.stdout.index("g048")
    assert f"and {GROUPS_MAX + 3} more" in result.stdout
    assert len(names) == GROUPS_MAX


def test_looks_take_turns_until_the_group_that_is_furthest_behind_is_found_and_stays_up_to_date(
    cluster: FakeCluster, smq: Callable[..., Result]
) -> None:
    """It is the last one by name, of four times as many as a look asks for."""
    count = 4 * GROUPS_MAX
    add_groups(cluster, count)
    names = asked(cluster)
    result = smq("top", "--count", "7", "--interval", "0.2", "--rows", "2")
    assert result.exit_code == 0, result.stderr
    assert set(names) == {f"g{n:03}" for n in range(count)}
    last = result.stdout.rpartition("cluster fake: ")[2]
    assert last.index(f"g{count - 1:03}") < last.index(f"g{count - 2:03}")
    assert f"and {count - 2} more" in last
    looks = [names[i : i + GROUPS_MAX] for i in range(0, len(names), GROUPS_MAX)]
    assert f"g{count - 1:03}" in looks[-1], "what is far behind is asked for by each look"
    assert len(names) == 7 * GROUPS_MAX


def test_groups_are_asked_for_beside_each_other_within_a_bound() -> None:
    running = most = 0

    class Admin:
        async def list_groups(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=f"g{n:03}") for n in range(30)]

        async def describe_group(self, name: str, *, with_sizes: bool) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return name

    admin: Any = Admin()
    found, left = asyncio.run(Groups().look(admin))
    assert (len(found or ()), left, most) == (30, 0, ASKED_AT_ONCE)


def test_open_transactions_free_disks_and_the_newest_events_are_shown() -> None:
    event = NodeEvent(at_ms=1_000, kind="leader", text="t/0: node 2 leads\x1b[31m, epoch 3")
    (status,) = look(1.0).nodes.values()
    assert status is not None
    status = replace(status, disk_free_bytes=1 << 30, disk_total_bytes=4 << 30, events=(event,))
    transaction = TransactionSummary(
        transactional_id="billing", state="Ongoing", producer_id=1, producer_epoch=0, timeout_ms=60_000, open_ms=12_000
    )
    text = shown(replace(look(1.0), nodes={1: status}, transactions=[transaction]))
    assert "1 open transaction, the oldest billing for 12 s" in text
    assert "1.0 GiB (25%)" in text
    assert "01-01 00:00:01  node 1   leader  t/0: node 2 leads[31m, epoch 3" in text, "no control characters"
    assert "no open transactions" in shown(replace(look(1.0), transactions=[]))


def test_what_several_nodes_have_seen_is_one_event() -> None:
    seen = [Seen(2_000, 2, "leader", "x"), Seen(1_000, 1, "leader", "x"), Seen(1_500, 3, "raft", "x")]
    again = [Seen(2_500, 1, "leader", "x"), Seen(9_000, 2, "leader", "x")]
    assert [(e.at_ms, e.node) for e in merged([*seen, *again])] == [(1_000, 1), (1_500, 3), (2_500, 1), (9_000, 2)]


def test_two_looks_show_both_topics_and_a_group_that_goes_meanwhile_is_no_error(
    cluster: FakeCluster, smq: Callable[..., Result]
) -> None:
    cluster.append("busy", 0, [NewRecord(None, b"v", 1)] * 10)
    add_groups(cluster, 2)

    def gone(name: str, request: Any) -> None:
        if name == "DescribeGroup" and request.group == "g001":
            raise SmqError(ErrorCode.UNKNOWN_GROUP, "there is no group 'g001'")

    cluster.nodes[1].hook = gone
    result = smq("top", "--count", "2", "--interval", "0.2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("cluster fake: ") == 2
    assert all(name in result.stdout for name in ("busy", "idle", "g000"))
    assert "g001" not in result.stdout
