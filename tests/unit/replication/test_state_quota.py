"""The bound of the replicated state: what is refused beyond it, what goes on, and how deletions make room."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AddPartitions, Command, CommitOffsets, DeleteTopic, OffsetCommit, StageOffsets
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import LogIndex, Offset, PartitionId, ProducerEpoch, ProducerId, RequestId
from smq.raft_state.machine import Machine
from smq.replication import state_quota
from smq.replication.raft.messages import SNAPSHOT_BYTES_MAX
from smq.replication.state_quota import STATE_BYTES_MAX, StateQuota
from tests.unit.raft_state.support import (
    Driver,
    assign_members,
    cluster,
    commit,
    delete_group,
    delete_offsets,
    form,
    member,
    pid,
    rid,
    topic,
)

SNAPSHOT = (LogIndex(100), STATE_BYTES_MAX)


def with_metadata(
    group: str, text: str, *partitions: PartitionId, request: RequestId = RequestId(b"")
) -> CommitOffsets:
    items = tuple(OffsetCommit(partition=p, offset=Offset(7), metadata=text) for p in partitions)
    return replace(commit(group, request=request), items=items)


def staged(group: str, text: str, *partitions: PartitionId) -> StageOffsets:
    made = with_metadata(group, text, *partitions)
    return StageOffsets(
        group=group,
        coordinator_epoch=made.coordinator_epoch,
        transactional_id="x",
        transaction_changes_seen=0,
        producer_id=ProducerId(1),
        producer_epoch=ProducerEpoch(0),
        items=made.items,
        committed_ms=5,
    )


@pytest.fixture
def driver() -> Driver:
    """Group g has committed "abc" for the first of two partitions of t1, and group h for one of t2."""
    driver = cluster()
    driver.ok(topic(1, partitions=2))
    driver.ok(topic(2))
    driver.ok(with_metadata("g", "abc", pid(1, 0), request=rid(1)))
    driver.ok(with_metadata("h", "abcdef", pid(2, 0)))
    return driver


ADDING: list[Command] = [
    topic(3),
    AddPartitions(name="t1", partition_count=3),
    with_metadata("g", "abcd", pid(1, 0)),
    with_metadata("g", "äbc", pid(1, 0)),
    with_metadata("g", "", pid(1, 0), pid(1, 1)),
    with_metadata("new", "", pid(1, 0)),
    staged("g", "abcd", pid(1, 0)),
    form("new", 1, 0, member("a")),
]
OTHERS: list[Command] = [
    with_metadata("g", "abc", pid(1, 0)),
    with_metadata("g", "", pid(1, 0)),
    with_metadata("g", "longer than before", pid(1, 0), request=rid(1)),  # its reply is known
    staged("g", "xyz", pid(1, 0)),
    form("g", 1, 0, member("a")),
    assign_members("g", 1, 1, a=b"x" * 1_000),
    delete_group("g"),
    delete_offsets("g", 0, pid(1, 0)),
    DeleteTopic(name="t1"),
]


def test_a_snapshot_below_the_bound_is_far_from_what_receivers_refuse() -> None:
    assert 2 * STATE_BYTES_MAX <= SNAPSHOT_BYTES_MAX


@pytest.mark.parametrize("command", ADDING)
def test_at_the_bound_what_adds_is_refused_with_advice(driver: Driver, command: Command) -> None:
    refused = StateQuota(lambda: SNAPSHOT).refusal(driver.machine.state, command)
    assert refused is not None
    assert refused.code is ErrorCode.LIMIT_EXCEEDED
    assert "512 MiB" in refused.message
    assert "delete groups" in refused.message


@pytest.mark.parametrize("command", ADDING)
def test_below_the_bound_nothing_is_refused(driver: Driver, command: Command) -> None:
    quota = StateQuota(lambda: (LogIndex(100), STATE_BYTES_MAX - 1))
    assert quota.refusal(driver.machine.state, command) is None


@pytest.mark.parametrize("command", OTHERS)
def test_at_the_bound_everything_else_goes_on(driver: Driver, command: Command) -> None:
    assert StateQuota(lambda: SNAPSHOT).refusal(driver.machine.state, command) is None


def test_a_warning_comes_before_the_first_refusal() -> None:
    size = STATE_BYTES_MAX // 2
    quota = StateQuota(lambda: (LogIndex(100), size))
    assert quota.warnings() == []
    size = STATE_BYTES_MAX * 9 // 10
    assert not quota.is_full
    assert "delete groups" in quota.warnings()[0]


@pytest.mark.parametrize("command", [delete_group("g"), delete_offsets("g", 0, pid(1, 0)), DeleteTopic(name="t1")])
def test_what_a_deletion_frees_is_what_the_snapshot_loses_of_commits(driver: Driver, command: Command) -> None:
    freed = StateQuota(lambda: SNAPSHOT).freed_by(driver.machine.state, command)
    other = Machine.restore(driver.machine.snapshot())
    before = len(other.snapshot())
    del other.state.groups["g"].offsets[pid(1, 0)]
    assert freed == before - len(other.snapshot()) > 0


def test_deletions_make_room_immediately_and_the_next_snapshot_counts_anew(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = (LogIndex(100), 1_000)
    monkeypatch.setattr(state_quota, "STATE_BYTES_MAX", 1_000)
    quota = StateQuota(lambda: snapshot)

    def is_refused() -> bool:
        return quota.refusal(driver.machine.state, topic(3)) is not None

    assert is_refused()
    quota.note_freed(quota.freed_by(driver.machine.state, delete_group("g")))
    assert not is_refused()
    snapshot = (LogIndex(200), 1_000)
    assert is_refused()
