"""Feature levels: raised once every node knows them, never lowered; what a node does not know stops it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos_tests.sim.levels import LEVEL_TWO, SETTING, Note, level_two
from smq.raft_state.command_codec import (
    FEATURE_LEVEL,
    CodecError,
    FeatureNotEnabled,
    UpgradeNeeded,
    decode_command,
    encode_command,
    encode_reply,
)
from smq.raft_state.commands import AlterClusterConfig, AlterTopicConfig, Barrier, FenceNode, RaiseFeatureLevel, Request
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Incarnation, LogIndex, NodeId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Done, Rejected
from smq.raft_state.topic_config import differing
from tests.unit.raft_state.support import Driver, register, rid, topic


@pytest.fixture(autouse=True)
def newer() -> Iterator[None]:
    """An smq that knows level 2, which has one command more."""
    with level_two():
        yield


@pytest.fixture
def driver() -> Driver:
    """Nodes 1 and 2 know level 2, node 3 does not."""
    made = Driver(Machine(known_level=LEVEL_TWO))
    made.ok(default_init("c"))
    for node, level in ((1, 2), (2, 2), (3, 1)):
        made.ok(register(node, level=level))
    return made


def test_the_level_rises_once_every_registered_node_knows_it(driver: Driver) -> None:
    assert driver.machine.state.feature_level == 1
    reply = driver.refused(RaiseFeatureLevel(level=2), ErrorCode.FEATURE_NOT_ENABLED)
    assert "nodes 3 do not know feature level 2" in reply.message
    assert driver.machine.state.feature_level == 1
    driver.ok(register(3, incarnation=2, level=2))
    driver.ok(RaiseFeatureLevel(level=2))
    assert driver.machine.state.feature_level == 2


def test_a_node_that_is_down_counts_too(driver: Driver) -> None:
    driver.ok(FenceNode(node=NodeId(3), incarnation=Incarnation(1)))
    driver.refused(RaiseFeatureLevel(level=2), ErrorCode.FEATURE_NOT_ENABLED)


def test_the_level_is_never_lowered(driver: Driver) -> None:
    driver.ok(register(3, incarnation=2, level=2))
    driver.ok(RaiseFeatureLevel(level=2))
    for level in (2, 1, 0, -1):
        assert driver.ok(RaiseFeatureLevel(level=level)) == Done()
        assert driver.machine.state.feature_level == 2


def test_a_node_that_does_not_know_the_level_is_not_registered(driver: Driver) -> None:
    driver.ok(register(3, incarnation=2, level=2))
    driver.ok(RaiseFeatureLevel(level=2))
    reply = driver.refused(register(3, incarnation=3, level=1), ErrorCode.UPGRADE_NEEDED)
    assert "the cluster is at feature level 2" in reply.message
    assert "up to 1" in reply.message
    assert driver.machine.state.nodes[register(3).node].incarnation == 2
    driver.refused(register(4, level=1), ErrorCode.UPGRADE_NEEDED)


def test_the_level_survives_a_snapshot_and_stops_a_node_that_does_not_know_it(driver: Driver) -> None:
    driver.ok(register(3, incarnation=2, level=2))
    driver.ok(RaiseFeatureLevel(level=2))
    snapshot = driver.machine.snapshot()
    restored = _restored(snapshot, 2)
    assert restored.state == driver.machine.state
    with pytest.raises(UpgradeNeeded, match=r"snapshot .* feature level 2; .*up to 1: run a newer smq"):
        _restored(snapshot, 1)


def _restored(snapshot: bytes, known: int) -> Machine:
    steps = Machine.restoring(snapshot, known)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            machine: Machine = end.value
            return machine


def test_a_machine_that_does_not_know_the_level_stops_at_the_entry_that_raises_it() -> None:
    old = Machine(known_level=1)
    for index, command in enumerate((default_init("c"), register(1, level=2)), 1):
        old.apply(LogIndex(index), command)
    with pytest.raises(UpgradeNeeded, match=r"the cluster is at feature level 2; .*up to 1"):
        old.apply(LogIndex(3), RaiseFeatureLevel(level=2))


def test_a_command_is_not_encoded_before_the_cluster_is_at_its_level() -> None:
    with pytest.raises(FeatureNotEnabled, match="Note needs feature level 2, and the cluster is at level 1"):
        encode_command(Note(text="x"), 1)
    data = encode_command(Note(text="x"), 2)
    assert data[0] == 2
    assert decode_command(data, 2) == Note(text="x")


def test_an_unknown_command_says_which_level_it_needs() -> None:
    with pytest.raises(UpgradeNeeded, match=r"command of feature level 2; .*up to 1: run a newer smq") as e:
        decode_command(encode_command(Note(text="x"), 2), 1)
    assert e.value.level == 2
    assert isinstance(e.value, CodecError)


def test_what_level_1_has_is_written_as_before_at_any_level() -> None:
    assert encode_command(Barrier(), 1) == encode_command(Barrier(), 2)
    assert encode_reply(Done(), 1) == encode_reply(Done(), 2)


def test_this_smq_knows_every_level_up_to_its_own() -> None:
    assert FEATURE_LEVEL == 1
    assert LEVEL_TWO == FEATURE_LEVEL + 1


# ------------------------------------------------------------------------------------------------ settings
NAMING: tuple[Request, ...] = (
    AlterClusterConfig(set_=((SETTING, "1"),), request_id=rid(1)),
    AlterClusterConfig(unset=(SETTING,), request_id=rid(2)),
    AlterTopicConfig(name="t1", set_=((SETTING, "1"),), request_id=rid(3)),
    AlterTopicConfig(name="t1", unset=(SETTING,), request_id=rid(4)),
    replace(topic(2), config=((SETTING, "1"),), request_id=rid(5)),
)


@pytest.mark.parametrize("command", NAMING)
def test_a_setting_of_a_level_that_the_cluster_has_not_reached_is_not_proposed(command: Request) -> None:
    with pytest.raises(
        FeatureNotEnabled, match=f"the configuration {SETTING} needs feature level 2, and the .* at level 1"
    ):
        encode_command(command, 1)
    assert decode_command(encode_command(command, 2)) == command


@pytest.mark.parametrize("command", NAMING)
def test_below_its_level_a_setting_is_refused_as_an_older_smq_refuses_it(command: Request) -> None:
    """A node with the older smq has proposed it: all nodes must come to the same state, replies included."""
    ends = []
    for known in (1, 2):
        made = Machine(known_level=known)
        for index, step in enumerate((default_init("c"), register(1, level=2), topic(1, replicas=1), command), 1):
            applied = made.apply(LogIndex(index), step)
        assert isinstance(applied.reply, Rejected)
        assert applied.reply.code is ErrorCode.INVALID_CONFIG
        ends.append((applied.reply, made.digest()))
    assert ends[0] == ends[1]


def test_a_setting_is_taken_at_its_level_and_survives_a_snapshot(driver: Driver) -> None:
    driver.ok(topic(1))
    driver.ok(register(3, incarnation=2, level=2))
    driver.ok(RaiseFeatureLevel(level=2))
    for command in NAMING:
        driver.ok(command)
    driver.ok(AlterTopicConfig(name="t1", set_=((SETTING, "1"),)))
    restored = _restored(driver.machine.snapshot(), 2)
    assert restored.state == driver.machine.state
    assert restored.state.topics["t1"].config == {SETTING: "1"}


def test_what_is_stored_under_an_unknown_key_stays() -> None:
    assert differing({"of.a.newer.smq": "1", "max.message.bytes": "7", "cleanup.policy": "delete"}) == {
        "of.a.newer.smq": "1",
        "max.message.bytes": "7",
    }
