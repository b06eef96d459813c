"""Committed offsets of groups, producer ids, and commands that are retried under a request id."""

from dataclasses import replace

import pytest

from smq.raft_state.command_table import cache_of
from smq.raft_state.commands import AddPartitions, AllocateProducerId, CommitOffsets, DeleteTopic, OffsetCommit, Request
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import producer_ids
from smq.raft_state.ids import Offset, PartitionId, ProducerEpoch, ProducerId, RequestId
from smq.raft_state.invariants import InvariantBroken
from smq.raft_state.limits import COMMIT_ITEMS_MAX, METADATA_BYTES_MAX, PRODUCER_EPOCH_RETIRED, default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, Done, ProducerIdAllocated, Rejected
from smq.raft_state.state import Cache, ClusterState, ReplyCache
from tests.unit.raft_state.support import (
    Driver,
    aged,
    cluster,
    commit,
    delete_group,
    pid,
    register,
    rid,
    settings,
    topic,
)


@pytest.fixture
def driver() -> Driver:
    driver = cluster()
    driver.ok(topic(1, partitions=2))
    return driver


def committed(driver: Driver, group: str) -> dict[PartitionId, int]:
    return {p: c.offset for p, c in driver.machine.state.groups[group].offsets.items()}


# ------------------------------------------------------------------------------------------------ commits
def test_commit_is_kept_and_a_later_one_replaces_it_even_backwards(driver: Driver) -> None:
    assert driver.ok(commit("g", (pid(1, 0), 10), (pid(1, 1), 20))) == Done()
    driver.ok(commit("g", (pid(1, 0), 4)))
    assert committed(driver, "g") == {pid(1, 0): 4, pid(1, 1): 20}


def test_commit_keeps_metadata_leader_epoch_and_time(driver: Driver) -> None:
    item = OffsetCommit(partition=pid(1), offset=Offset(1), metadata="é", leader_epoch=4)
    driver.ok(replace(commit("g", at_ms=123), items=(item,)))
    entry = driver.machine.state.groups["g"].offsets[pid(1)]
    assert (entry.metadata, entry.committed_ms, entry.leader_epoch) == ("é", 123, 4)


def test_commit_of_a_negative_offset_is_kept_and_is_no_position(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 5), (pid(1, 1), -1)))
    assert committed(driver, "g") == {pid(1): 5, pid(1, 1): -1}
    assert [c.position for c in driver.machine.state.groups["g"].offsets.values()] == [5, None]


TOO_LONG = OffsetCommit(partition=pid(1), offset=Offset(1), metadata="x" * (METADATA_BYTES_MAX + 1))
BAD_COMMITS = [
    *((commit(group, (pid(1), 5)), ErrorCode.INVALID_REQUEST) for group in ("", "g" * 513, "a\x00b", "a\n", "\x7f")),
    (replace(commit("g"), items=(TOO_LONG,)), ErrorCode.INVALID_REQUEST),
    (commit("g", (pid(1), 5), (pid(1), 6)), ErrorCode.INVALID_REQUEST),
    (commit("g", (pid(1), 5), (pid(1, 2), 5)), ErrorCode.UNKNOWN_PARTITION),
    (commit("g", *[(pid(1), 5)] * (COMMIT_ITEMS_MAX + 1)), ErrorCode.LIMIT_EXCEEDED),
]


@pytest.mark.parametrize(("command", "code"), BAD_COMMITS)
def test_a_bad_commit_is_refused_as_a_whole(driver: Driver, command: CommitOffsets, code: ErrorCode) -> None:
    driver.refused(command, code)
    assert driver.machine.state.groups == {}


def test_commit_without_items_is_done_and_creates_no_group(driver: Driver) -> None:
    assert driver.ok(commit("g")) == Done()
    assert driver.machine.state.groups == {}


# ------------------------------------------------------------------------------------------------ producer ids
def bump(producer_id: int, epoch: int) -> AllocateProducerId:
    return AllocateProducerId(producer_id=ProducerId(producer_id), producer_epoch=ProducerEpoch(epoch))


def allocated(producer_id: int, epoch: int) -> ProducerIdAllocated:
    return ProducerIdAllocated(producer_id=ProducerId(producer_id), producer_epoch=ProducerEpoch(epoch))


def test_fresh_producer_ids_ascend_in_epoch_0(driver: Driver) -> None:
    assert [driver.ok(AllocateProducerId()) for _ in range(3)] == [allocated(n, 0) for n in range(3)]
    assert driver.machine.state.producers == {}


def test_producer_id_is_bumped_and_its_former_epoch_is_fenced(driver: Driver) -> None:
    driver.ok(AllocateProducerId())
    assert driver.ok(bump(0, 0)) == allocated(0, 1)
    driver.refused(bump(0, 0), ErrorCode.PRODUCER_FENCED)
    driver.refused(bump(0, 2), ErrorCode.PRODUCER_FENCED)
    assert driver.ok(bump(0, 1)) == allocated(0, 2)


@pytest.mark.parametrize(("producer_id", "epoch"), [(1, 0), (-2, 0), (-1, 0)])
def test_producer_id_never_allocated_is_an_invalid_request(driver: Driver, producer_id: int, epoch: int) -> None:
    driver.ok(AllocateProducerId())
    driver.refused(bump(producer_id, epoch), ErrorCode.INVALID_REQUEST)


def test_producer_id_out_of_epochs_is_replaced_and_stays_fenced(driver: Driver) -> None:
    driver.ok(AllocateProducerId())
    last = PRODUCER_EPOCH_RETIRED - 1
    driver.machine.state.producers[ProducerId(0)] = ProducerEpoch(last)
    assert driver.ok(bump(0, last)) == allocated(1, 0)
    driver.refused(bump(0, last), ErrorCode.PRODUCER_FENCED)
    driver.refused(bump(0, PRODUCER_EPOCH_RETIRED), ErrorCode.PRODUCER_FENCED)


def test_bumped_producers_are_bounded_and_the_oldest_bump_is_dropped(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_ids, "PRODUCERS_MAX", 2)
    for _ in range(3):
        driver.ok(AllocateProducerId())
    driver.ok(bump(0, 0))
    driver.ok(bump(1, 0))
    driver.ok(bump(0, 1))
    driver.ok(bump(2, 0))
    assert driver.machine.state.producers == {0: 2, 2: 1}
    driver.refused(bump(1, 1), ErrorCode.PRODUCER_FENCED)


# ------------------------------------------------------------------------------------------------ request ids
def test_retry_under_the_same_request_id_gets_the_first_reply_and_changes_nothing(driver: Driver) -> None:
    command = replace(topic(5, "new"), request_id=rid(1))
    first = driver.apply(command)
    before = driver.machine.digest()
    again = driver.apply(command)
    assert again == Applied(reply=first.reply)
    assert driver.machine.digest() == before


def test_retry_gets_the_first_reply_although_the_state_has_moved_on(driver: Driver) -> None:
    delete = DeleteTopic(name="t1", request_id=rid(1))
    driver.ok(delete)
    driver.ok(topic(2, "t1"))
    assert driver.ok(delete) == Done()
    assert "t1" in driver.machine.state.topics


def test_rejection_is_remembered_too(driver: Driver) -> None:
    delete = DeleteTopic(name="later", request_id=rid(1))
    first = driver.refused(delete, ErrorCode.UNKNOWN_TOPIC)
    driver.ok(topic(2, "later"))
    assert driver.refused(delete, ErrorCode.UNKNOWN_TOPIC) == first
    driver.ok(replace(delete, request_id=rid(2)))


def test_retried_allocation_gives_the_same_producer_id(driver: Driver) -> None:
    command = AllocateProducerId(request_id=rid(1))
    assert driver.ok(command) == driver.ok(command) == allocated(0, 0)
    assert driver.ok(AllocateProducerId(request_id=rid(2))) == allocated(1, 0)


def test_reply_cache_is_bounded_and_forgets_the_oldest() -> None:
    driver = Driver()
    driver.ok(replace(default_init("c"), replies_max=2))
    for n in (1, 2, 1, 3):
        driver.ok(AllocateProducerId(request_id=rid(n)))
    assert list(cache(driver, Cache.GROUPS_AND_PRODUCERS).replies) == [rid(2), rid(3)]
    assert driver.ok(AllocateProducerId(request_id=rid(1))) == allocated(3, 0)


def cache(driver: Driver, kind: Cache) -> ReplyCache:
    return driver.machine.state.replies[kind]


def small_cache() -> Driver:
    driver = Driver()
    driver.ok(replace(default_init("c"), replies_max=2))
    driver.ok(register(1))
    return driver


def test_a_request_that_is_proposed_again_after_its_reply_was_forgotten_is_refused() -> None:
    """A node that was cut off proposes a DeleteTopic again, but by now another topic has that name."""
    driver = small_cache()
    driver.ok(aged(0, topic(1, "t", replicas=1)))
    delete, accepted = DeleteTopic(name="t", request_id=rid(1)), cache(driver, Cache.ADMINISTRATION).counted
    driver.ok(aged(accepted, delete))
    driver.ok(aged(1, replace(topic(2, "t", replicas=1), request_id=rid(2))))
    driver.ok(aged(accepted, delete))  # known: answered as the first time, and nothing is deleted
    driver.ok(aged(2, AddPartitions(name="t", partition_count=2, request_id=rid(3))))
    driver.refused(aged(accepted, delete), ErrorCode.REQUEST_EXPIRED)
    assert "t" in driver.machine.state.topics
    assert cache(driver, Cache.ADMINISTRATION).counted == 3


@pytest.mark.parametrize("kind", [Cache.BY_NODE, Cache.GROUPS_AND_PRODUCERS])
def test_a_clients_deletion_is_recognised_whatever_nodes_and_commits_do_meanwhile(kind: Cache) -> None:
    """The client has lost the answer and asks another node, which takes the request for a new one."""
    driver = small_cache()
    driver.ok(topic(1, "t", replicas=1))
    delete = DeleteTopic(name="t", request_id=rid(1))
    first = driver.ok(delete)
    driver.ok(replace(topic(2, "t", replicas=1), request_id=rid(2)))
    for n in range(3, 13):
        driver.ok(replace(commit("g", (pid(2), n), request=rid(n)), is_from_node=kind is Cache.BY_NODE))
    retry = aged(cache(driver, Cache.ADMINISTRATION).counted, delete)
    assert driver.ok(retry) == first
    assert "t" in driver.machine.state.topics
    assert [len(cache(driver, each).replies) for each in (kind, Cache.ADMINISTRATION)] == [2, 2]
    assert Driver(Machine.restore(driver.machine.snapshot())).ok(retry) == first


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (DeleteTopic(name="t"), Cache.ADMINISTRATION),
        (settings(num_partitions=2), Cache.ADMINISTRATION),
        (AllocateProducerId(), Cache.GROUPS_AND_PRODUCERS),
        (commit("g"), Cache.GROUPS_AND_PRODUCERS),
        (delete_group("g"), Cache.GROUPS_AND_PRODUCERS),
    ],
)
def test_a_request_is_remembered_by_who_numbered_it_and_what_it_is_about(request_: Request, kind: Cache) -> None:
    state = ClusterState()
    assert cache_of(state, request_) is state.replies[kind]
    assert cache_of(state, replace(request_, is_from_node=True)) is state.replies[Cache.BY_NODE]


def test_a_commit_that_is_proposed_again_too_late_moves_no_group_back() -> None:
    driver = small_cache()
    driver.ok(topic(1, "t", replicas=1))
    commits = [commit("g", (pid(1), n), request=rid(n)) for n in (1, 2, 3)]
    for number, command in enumerate(commits):
        driver.ok(aged(number, command))
    driver.refused(aged(0, commits[0]), ErrorCode.REQUEST_EXPIRED)
    assert driver.machine.state.groups["g"].offsets[pid(1)].offset == 3


def test_a_new_request_is_accepted_however_many_came_before_it() -> None:
    driver = small_cache()
    for n in range(10):
        driver.ok(aged(max(0, n - 2), AllocateProducerId(request_id=rid(n))))


def test_a_request_of_unknown_age_is_accepted_and_counted() -> None:
    driver = small_cache()
    for n in (1, 2, 3, 1):
        driver.ok(AllocateProducerId(request_id=rid(n)))
    assert cache(driver, Cache.GROUPS_AND_PRODUCERS).counted == 4


def test_rejection_before_init_is_not_remembered() -> None:
    """The cluster has no cache yet; the retry after the start must succeed."""
    driver = Driver()
    command = AllocateProducerId(request_id=rid(1))
    driver.refused(command, ErrorCode.NODE_NOT_READY)
    driver.ok(default_init("c"))
    driver.ok(command)


def test_request_id_of_a_wrong_length_is_an_invalid_request(driver: Driver) -> None:
    command = AllocateProducerId(request_id=RequestId(b"short"))
    driver.refused(command, ErrorCode.INVALID_REQUEST)
    assert driver.machine.state.replies == ClusterState().replies


def test_reply_cache_survives_a_snapshot(driver: Driver) -> None:
    command = AllocateProducerId(request_id=rid(1))
    first = driver.ok(command)
    restored = Driver(Machine.restore(driver.machine.snapshot()))
    assert restored.ok(command) == first


def test_long_user_text_is_cut_in_messages(driver: Driver) -> None:
    reply = driver.apply(DeleteTopic(name="x" * 9000)).reply
    assert isinstance(reply, Rejected)
    assert len(reply.message) < 200


# ------------------------------------------------------------------------------------------------ the index
def test_index_applied_twice_breaks_an_invariant(driver: Driver) -> None:
    driver.ok(AllocateProducerId())
    driver.index -= 1
    with pytest.raises(InvariantBroken, match="is applied after"):
        driver.apply(AllocateProducerId())
