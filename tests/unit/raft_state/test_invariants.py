"""Each broken invariant is detected: a state that is damaged in one place does not pass the check."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from smq.raft_state.ids import (
    DiskId,
    Epoch,
    Generation,
    Incarnation,
    NodeId,
    Offset,
    ProducerEpoch,
    ProducerId,
    RequestId,
    TopicId,
    TsNs,
)
from smq.raft_state.invariants import InvariantBroken, check
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState, EpochStart, GroupPhase, PartitionState
from tests.unit.raft_state.support import (
    CURRENT,
    advance,
    advances,
    assign_members,
    cluster,
    commit,
    elect,
    form,
    member,
    pid,
    register,
    topic,
)


def healthy() -> ClusterState:
    driver = cluster()
    driver.ok(register(4, kafka="host:4"))
    driver.ok(form("m", CURRENT, 0, member("a")))
    driver.ok(assign_members("m", CURRENT, 1, a=b"x"))
    driver.ok(topic(1, "t", partitions=2))
    driver.ok(advances(advance(pid(1), 0, hwm=5, next_offset=8)))
    driver.ok(elect(pid(1), 0, 2, 5))
    driver.ok(commit("g", (pid(1), 3)))
    check(driver.machine.state)
    return driver.machine.state


def remember(state: ClusterState, request_id: RequestId) -> None:
    state.replies[0].replies[request_id] = b""
    state.replies[0].counted += 1


def first(state: ClusterState) -> PartitionState:
    return state.topics["t"].partitions[0]


def epochs(*pairs: tuple[int, int]) -> list[EpochStart]:
    return [EpochStart(Epoch(epoch), Offset(start)) for epoch, start in pairs]


Damage = Callable[[ClusterState], object]


def both(one: Damage, other: Damage) -> Damage:
    def damage(state: ClusterState) -> None:
        one(state)
        other(state)

    return damage


DAMAGES: dict[str, Damage] = {
    "schema": lambda s: setattr(s, "feature_level", 0),
    "state before init": lambda s: setattr(s, "cluster_id", ""),
    "disk id of another length": lambda s: s.nodes.update({NodeId(1): replace(s.nodes[NodeId(1)], disk=DiskId(b"d"))}),
    "node misfiled": lambda s: s.nodes.update({NodeId(9): s.nodes[NodeId(1)]}),
    "too many topics": lambda s: setattr(s, "topics_max", 0),
    "too many partitions": lambda s: setattr(s, "partitions_max", 1),
    "too many groups": lambda s: setattr(s, "groups_max", 0),
    "too many replies": both(lambda s: setattr(s, "replies_max", 0), lambda s: remember(s, RequestId(b"r" * 16))),
    "request id": lambda s: remember(s, RequestId(b"r")),
    "replies uncounted": lambda s: s.replies[1].replies.update({RequestId(b"r" * 16): b""}),
    "topic misfiled": lambda s: setattr(s.topics["t"], "name", "u"),
    "topic id unknown": lambda s: s.topic_names.clear(),
    "topic id leads elsewhere": lambda s: setattr(s.topics["t"], "topic_id", TopicId(b"x" * 16)),
    "no partitions": lambda s: s.topics["t"].partitions.clear(),
    "partitions swapped": lambda s: s.topics["t"].partitions.reverse(),
    "replicas missing": lambda s: setattr(first(s), "replicas", (NodeId(1), NodeId(2))),
    "replica twice": lambda s: setattr(first(s), "replicas", (NodeId(1), NodeId(2), NodeId(2))),
    "replica unknown": lambda s: setattr(first(s), "replicas", (NodeId(1), NodeId(2), NodeId(7))),
    "leader is no replica": lambda s: setattr(first(s), "leader", NodeId(7)),
    "leader from the future": lambda s: setattr(first(s), "leader_incarnation", Incarnation(2)),
    "hwm above next_offset": lambda s: setattr(first(s), "hwm", Offset(6)),
    "log_start above hwm": lambda s: setattr(first(s), "log_start", Offset(6)),
    "log_start negative": lambda s: setattr(first(s), "log_start", Offset(-1)),
    "ts negative": lambda s: setattr(first(s), "ts_ns", TsNs(-1)),
    "history empty": lambda s: first(s).history.clear(),
    "history's epoch": lambda s: setattr(first(s), "epoch", Epoch(2)),
    "history's epochs descend": lambda s: setattr(first(s), "history", epochs((1, 0), (1, 5))),
    "history's starts descend": lambda s: setattr(first(s), "history", epochs((0, 0), (0, 4), (1, 3))),
    "history begins late": lambda s: setattr(first(s), "history", epochs((1, 5))),
    "history begins at a log start that has moved": both(
        lambda s: setattr(first(s), "log_start", Offset(5)), lambda s: setattr(first(s), "history", epochs((1, 5)))
    ),
    "epoch starts above the hwm": lambda s: setattr(first(s), "history", epochs((0, 0), (1, 6))),
    "history with an epoch without records": both(
        lambda s: setattr(first(s), "history", epochs((-3, 0), (-2, 4), (-1, 4), (1, 5))),
        lambda s: setattr(first(s), "log_start", Offset(0)),
    ),
    "history not pruned": both(
        lambda s: setattr(first(s), "log_start", Offset(4)),
        lambda s: setattr(first(s), "history", epochs((-1, 0), (0, 3), (1, 5))),
    ),
    "group used and unused": lambda s: setattr(s.groups["g"], "was_unused", True),
    "group with a negative count": lambda s: setattr(s.groups["g"], "changes", -1),
    "group's partition gone": lambda s: s.groups["g"].offsets.update({pid(2): s.groups["g"].offsets[pid(1)]}),
    "group's phase": lambda s: setattr(s.groups["m"], "phase", GroupPhase.EMPTY),
    "group with members before its first generation": lambda s: setattr(s.groups["m"], "generation", Generation(0)),
    "group's protocol": lambda s: setattr(s.groups["m"], "protocol", "other"),
    "group's leader": lambda s: setattr(s.groups["m"], "leader", "other"),
    "member misfiled": lambda s: s.groups["m"].members.update(b=s.groups["m"].members["a"]),
    "assignment before its time": lambda s: setattr(s.groups["m"], "phase", GroupPhase.COMPLETING),
    "sum of the members' bytes": lambda s: setattr(s, "member_bytes", 0),
    "coordinator slot missing": lambda s: s.coordinators.pop(),
    "coordinator unknown": lambda s: s.coordinators.append(replace(s.coordinators.pop(), node=NodeId(9))),
    "coordinator from the future": lambda s: s.coordinators.append(
        replace(s.coordinators.pop(), incarnation=Incarnation(9))
    ),
    "coordinator without an epoch": lambda s: s.coordinators.append(replace(s.coordinators.pop(), epoch=Epoch(0))),
    "producer never allocated": lambda s: s.producers.update({ProducerId(0): ProducerEpoch(1)}),
    "producer in epoch 0": both(
        lambda s: setattr(s, "next_producer_id", ProducerId(1)),
        lambda s: s.producers.update({ProducerId(0): ProducerEpoch(0)}),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_state_is_detected(damage: Damage) -> None:
    state = healthy()
    damage(state)
    with pytest.raises(InvariantBroken):
        check(state)


def test_snapshot_of_a_damaged_state_is_not_restored() -> None:
    state = healthy()
    first(state).log_start = Offset(6)
    with pytest.raises(InvariantBroken):
        Machine.restore(Machine(state).snapshot())


def test_apply_that_would_break_the_order_of_offsets_raises() -> None:
    """The guard of every change: if a partition is damaged in memory, the process ends instead of writing it."""
    driver = cluster()
    driver.ok(topic(1))
    driver.partition(pid(1)).log_start = Offset(50)
    with pytest.raises(InvariantBroken):
        driver.apply(advances(advance(pid(1), 0, hwm=10)))


def test_unknown_command_raises() -> None:
    with pytest.raises(InvariantBroken, match="no handler"):
        Machine().apply(1, "a string")  # type: ignore[arg-type]  # the point of the test
