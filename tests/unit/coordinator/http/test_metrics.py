"""The text of /metrics: what Prometheus reads of partitions and groups, written piece by piece."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from smq.coordinator.http import exposition, group_metrics, partition_metrics
from smq.coordinator.http.collectors import ConnectionCollector
from smq.coordinator.http.metrics import series_pieces
from smq.coordinator.service import lag_monitor
from smq.coordinator.service.lag_monitor import Backlogs
from smq.raft_state.commands import (
    AdvanceExternalHwms,
    Assignment,
    AssignOffsets,
    DeleteTopic,
    ExternalAdvance,
    OffsetCommit,
)
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset, PartitionId, TsNs
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import Backlog, NodeApi, ReplicaStatus
from smq.replication.monitoring.measures import Traffic
from tests.unit.raft_state.support import commit, external_topic, pid, proposed, register, rid, topic

PARTITIONS = 1_200
GROUP = 'a "group" of \\'
NOW_NS = 10_000_000_000
FOUND = {
    (GROUP, pid(1)): Backlog(500, TsNs(7_500_000_000)),
    (GROUP, pid(1, 1)): Backlog(0, TsNs(-1)),
    (GROUP, pid(9)): Backlog(1, TsNs(1)),  # its topic has been deleted
}
BACKLOGS = Backlogs(FOUND, 0)


class FakeNode:
    """What a scrape needs of a node; `read` counts the replicas that it returned."""

    node_id = NodeId(1)
    raft_leader = node = NodeId(1)

    def __init__(self) -> None:
        self.machine, self.read = Machine(), 0
        self.machine.apply(LogIndex(0), default_init("c"))
        self.machine.apply(LogIndex(1), register(1))
        self.machine.apply(LogIndex(2), topic(1, "t", PARTITIONS, replicas=1))
        items = tuple(OffsetCommit(partition=p.pid, offset=Offset(0)) for p in self.state.topics["t"].partitions)
        self.machine.apply(LogIndex(3), proposed(self.state, replace(commit(GROUP), items=items)))

    @property
    def state(self) -> ClusterState:
        return self.machine.state

    def status(self) -> "FakeNode":
        return self

    def known_hwm(self, partition: PartitionState) -> Offset:
        return partition.hwm

    def traffic(self, partition: PartitionId) -> Traffic:
        return Traffic(produced_bytes=3, fetched_bytes=5)

    def replica_statuses(self) -> Iterator[ReplicaStatus]:
        for part in self.state.topics["t"].partitions:
            self.read += 1
            end = Offset(part.index + 1)
            yield ReplicaStatus(
                pid=part.pid,
                is_leader=True,
                epoch=Epoch(0),
                log_start=Offset(0),
                hwm=Offset(0),
                lso=Offset(0),
                appended_end=end,
                durable_end=end,
                verified_end=end,
                size_bytes=7,
            )


def scrape(node: FakeNode) -> list[bytes]:
    api: NodeApi = node  # type: ignore[assignment] # the part of it that a scrape uses
    return list(series_pieces(api, BACKLOGS, NOW_NS))


def test_every_partition_and_commit_has_its_series_once_whatever_the_groups_name() -> None:
    text = b"".join(scrape(FakeNode())).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ends = {s.labels["partition"]: s.value for s in families["smq_partition_durable_end_offset"].samples}
    assert ends == {str(index): index + 1 for index in range(PARTITIONS)}
    assert len(families["smq_partition_durable_end_offset"].samples) == PARTITIONS
    lags = families["smq_group_lag"].samples
    assert {s.labels["group"] for s in lags} == {GROUP}
    assert {(s.labels["topic"], s.labels["partition"]) for s in lags} == {("t", str(i)) for i in range(PARTITIONS)}
    assert [s.value for s in families["smq_group_members"].samples] == [0]
    assert {s.value for s in families["smq_group_committed_offset"].samples} == {0}
    assert all(family.documentation for family in families.values())


def test_lag_in_bytes_and_time_is_that_of_the_last_pass_with_the_age_as_of_now() -> None:
    text = b"".join(scrape(FakeNode())).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    shown = {
        name: {s.labels["partition"]: s.value for s in families[f"smq_group_lag_{name}"].samples}
        for name in ("bytes", "seconds")
    }
    assert shown == {"bytes": {"0": 500, "1": 0}, "seconds": {"0": 2.5, "1": 0}}


def test_a_partitions_bytes_are_counters_and_everything_else_is_a_gauge() -> None:
    families = list(text_string_to_metric_families(b"".join(scrape(FakeNode())).decode()))
    counters = {family.name: {s.value for s in family.samples} for family in families if family.type == "counter"}
    assert counters == {"smq_partition_produced_bytes": {3}, "smq_partition_fetched_bytes": {5}}
    assert {family.type for family in families} == {"counter", "gauge"}


def create_external(node: FakeNode, partitions: int) -> list[PartitionId]:
    """Of partition i, i + 3 offsets are assigned and i + 1 can be read."""
    node.machine.apply(LogIndex(4), external_topic(2, "images", partitions))
    pids = [p.pid for p in node.state.topics["images"].partitions]
    assignments = tuple(
        Assignment(request_id=rid(i), partition=p, count=i + 3, not_before=Offset(0)) for i, p in enumerate(pids)
    )
    node.machine.apply(LogIndex(5), AssignOffsets(items=assignments))
    advances = tuple(ExternalAdvance(partition=pid, offset=Offset(i + 1)) for i, pid in enumerate(pids))
    node.machine.apply(LogIndex(6), AdvanceExternalHwms(items=advances))
    return pids


def test_topics_of_external_storage_show_their_offsets_and_no_replicas() -> None:
    node = FakeNode()
    create_external(node, 2)
    text = b"".join(scrape(node)).decode()
    found = {
        (family.name, sample.labels["partition"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("topic") == "images"
    }
    assert found == {
        ("smq_partition_log_start_offset", "0"): 0,
        ("smq_partition_log_start_offset", "1"): 0,
        ("smq_partition_high_water_mark", "0"): 1,
        ("smq_partition_high_water_mark", "1"): 2,
        ("smq_partition_next_offset", "0"): 3,
        ("smq_partition_next_offset", "1"): 4,
    }


def test_an_external_topic_that_goes_in_the_middle_of_a_scrape_does_no_harm() -> None:
    node = FakeNode()
    create_external(node, PARTITIONS)
    api: NodeApi = node  # type: ignore[assignment] # the part of it that a scrape uses
    pieces = series_pieces(api, BACKLOGS, NOW_NS)
    for _ in range(PARTITIONS // exposition.READ_PER_PIECE + 2):  # into the external partitions
        next(pieces)
    node.machine.apply(LogIndex(7), DeleteTopic(name="images"))
    left = b"".join(pieces)
    assert 0 < left.count(b'smq_partition_next_offset{topic="images"') < PARTITIONS


def test_a_piece_of_a_scrape_reads_and_writes_a_bounded_number_of_series() -> None:
    node = FakeNode()
    create_external(node, PARTITIONS)
    api: NodeApi = node  # type: ignore[assignment] # the part of it that a scrape uses
    read, most_read, most_lines = 0, 0, 0
    for piece in series_pieces(api, BACKLOGS, NOW_NS):
        most_read, read = max(most_read, node.read - read), node.read
        most_lines = max(most_lines, sum(not line.startswith(b"#") for line in piece.splitlines()))
    assert most_read == exposition.READ_PER_PIECE
    assert most_lines == exposition.LINES_PER_PIECE


def test_a_topic_that_goes_in_the_middle_of_a_scrape_does_no_harm() -> None:
    node = FakeNode()
    api: NodeApi = node  # type: ignore[assignment] # the part of it that a scrape uses
    pieces = series_pieces(api, BACKLOGS, NOW_NS)
    next(pieces)
    node.machine = Machine()
    assert b"smq_partition_leader{" in b"".join(pieces)


@pytest.mark.parametrize("limit", [1, 5])
def test_no_more_partitions_than_the_limit_have_series_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(partition_metrics, "METRICS_PARTITIONS_MAX", limit)
    monkeypatch.setattr(group_metrics, "METRICS_PARTITIONS_MAX", limit)
    text = b"".join(scrape(FakeNode())).decode()
    assert text.count("smq_partition_leader{") == limit
    assert text.count("smq_group_lag{") == limit
    left = PARTITIONS - limit
    assert omitted(text) == {"partitions": left, "groups": 0, "group_offsets": left, "group_backlogs": 0}


def omitted(text: str) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {s.labels["of"]: s.value for s in families["smq_metrics_omitted"].samples}


def test_a_coordinators_first_groups_have_series_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    pid = node.state.topics["t"].partitions[0].pid
    for number in range(5):
        group = replace(commit(f"g{number}"), items=(OffsetCommit(partition=pid, offset=Offset(0)),))
        node.machine.apply(LogIndex(10 + number), proposed(node.state, group))
    monkeypatch.setattr(lag_monitor, "METRICS_GROUPS_MAX", 3)
    text = b"".join(scrape(node)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {s.labels["group"] for s in families["smq_group_members"].samples} == {GROUP, "g0", "g1"}
    assert {s.labels["group"] for s in families["smq_group_lag"].samples} == {GROUP, "g0", "g1"}
    assert omitted(text)["groups"] == 3


def test_replicas_that_may_lack_what_they_acknowledged_are_counted() -> None:
    node = FakeNode()
    part = node.state.topics["t"].partitions[7]
    part.incomplete = frozenset({NodeId(1), NodeId(9)})  # 9 holds no replica
    families = {f.name: f for f in text_string_to_metric_families(b"".join(scrape(node)).decode())}
    found = {s.labels["partition"]: s.value for s in families["smq_partition_incomplete_replicas"].samples}
    assert {partition for partition, count in found.items() if count} == {"7"}
    assert found["7"] == 1


def test_frames_that_a_peer_sent_damaged_are_counted_by_peer() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ConnectionCollector({}, {NodeId(2): 0, NodeId(3): 4}, None))
    counted = [registry.get_sample_value("smq_peer_frames_damaged_total", {"peer": peer}) for peer in ("2", "3")]
    assert counted == [0, 4]
