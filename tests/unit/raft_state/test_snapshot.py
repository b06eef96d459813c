"""Snapshots are exact and canonical, and the same whichever process makes them."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.command_codec import FEATURE_LEVEL, CodecError
from smq.raft_state.handlers import external_offsets as external
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.snapshot import decode_state, encode_state
from smq.raft_state.state import Cache, ClusterState
from tests.unit.raft_state import life
from tests.unit.raft_state.support import assign, cluster, commit, external_topic, pid, register, rid, topic

ROOT = Path(__file__).parents[3]

SNAPSHOT = life.end_of_life().snapshot()


def test_empty_machine_survives_a_snapshot() -> None:
    machine = Machine()
    restored = Machine.restore(machine.snapshot())
    assert restored.state == machine.state == ClusterState()


def test_full_state_survives_a_snapshot_with_the_same_digest() -> None:
    machine = life.end_of_life()
    restored = Machine.restore(machine.snapshot())
    assert restored.state == machine.state
    assert all(cache.replies for cache in machine.state.replies)
    assert [list(c.replies) for c in restored.state.replies] == [list(c.replies) for c in machine.state.replies]
    assert list(restored.state.producers) == list(machine.state.producers)
    assert restored.digest() == machine.digest()


@pytest.mark.parametrize("cut", range(len(life.commands()) + 1))
def test_machine_restored_anywhere_in_its_life_ends_the_same(cut: int) -> None:
    steps = life.commands()
    machine = Machine()
    life.run(machine, steps[:cut])
    restored = Machine.restore(memoryview(machine.snapshot()))
    life.run(restored, steps[cut:], first_index=cut + 1)
    assert restored.snapshot() == SNAPSHOT


def test_equal_states_have_equal_bytes_whatever_the_order_in_which_they_came_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external, "ASSIGNED_MAX", 1)  # so that answers are forgotten, and bounds kept in their place
    one, other = cluster(0), cluster(0)
    for driver, nodes in ((one, [1, 2, 3]), (other, [1, 3, 2])):
        for node in nodes:
            driver.ok(register(node, kafka="host:1" if node == 1 else ""))  # one node gets all slots of coordinators
    for driver, topics in ((one, [1, 2]), (other, [2, 1])):
        for n in topics:
            driver.ok(topic(n, partitions=3, replicas=1))
    for driver, groups in ((one, ["g", "h"]), (other, ["h", "g"])):
        for group in groups:
            items = [(pid(1), 1), (pid(2), 2)]
            driver.ok(commit(group, *(items if group == "g" else reversed(items))))
    for driver in (one, other):
        for group in ("g", "h"):  # once more: the order of commits is a part of the state
            driver.ok(commit(group, (pid(1), 1), (pid(2), 2)))
    for driver, requests in ((one, [1, 2]), (other, [2, 1])):
        driver.ok(external_topic(3, partitions=2))
        for n in requests:
            driver.ok(assign((rid(n), pid(3, n - 1), 1)))
        driver.ok(assign((rid(3), pid(3), 1), not_before=1))
    assert list(one.machine.state.assigned_before) == list(reversed(other.machine.state.assigned_before))
    assert one.machine.snapshot() == other.machine.snapshot()
    assert one.machine.digest() == other.machine.digest()


def test_order_of_replies_is_part_of_the_state() -> None:
    """It decides which reply is dropped first, so it must not be lost or sorted."""
    for kind in Cache:
        machine = life.end_of_life()
        before, cache = machine.digest(), machine.state.replies[kind]
        assert len(cache.replies) > 1
        cache.replies = dict(reversed(cache.replies.items()))
        assert machine.digest() != before


@pytest.mark.parametrize("kind", Cache)
def test_the_number_of_replies_is_part_of_the_state(kind: Cache) -> None:
    machine = life.end_of_life()
    machine.state.replies[kind].counted += 1
    assert machine.digest() != life.end_of_life().digest()
    assert Machine.restore(machine.snapshot()).state == machine.state


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_digest_is_the_same_under_every_hash_seed(seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.raft_state.life"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == life.end_of_life().digest()


def test_cut_snapshot_is_a_codec_error() -> None:
    for size in range(0, len(SNAPSHOT), 7):
        with pytest.raises(CodecError):
            decode_state(SNAPSHOT[:size], FEATURE_LEVEL)


def test_bytes_after_a_snapshot_are_a_codec_error() -> None:
    with pytest.raises(CodecError, match="left over"):
        decode_state(SNAPSHOT + b"\0", FEATURE_LEVEL)


@given(st.integers(0, len(SNAPSHOT) - 1), st.integers(0, 255))
def test_snapshot_with_one_byte_changed_is_another_state_or_a_codec_error(at: int, byte: int) -> None:
    damaged = bytearray(SNAPSHOT)
    damaged[at] = byte
    try:
        state = decode_state(damaged, FEATURE_LEVEL)
    except CodecError:
        return
    assert encode_state(state) == damaged


@given(st.binary(max_size=300))
def test_random_bytes_after_a_valid_header_are_a_state_or_a_codec_error(data: bytes) -> None:
    head = SNAPSHOT[:9]
    try:
        state = decode_state(head + data, FEATURE_LEVEL)
    except CodecError:
        return
    assert encode_state(state) == head + data


def test_entry_that_is_in_the_snapshot_twice_is_a_codec_error() -> None:
    machine = Machine()
    life.run(machine, [default_init("c"), register(1, kafka="a:1"), register(2)])
    snapshot = machine.snapshot()
    one, two = (b"\0\0\0" + bytes((node,)) + b"\0\0\0\0\0\0\0\x01" for node in (1, 2))
    assert snapshot.count(two) == 1
    with pytest.raises(CodecError, match="not in canonical form"):
        decode_state(snapshot.replace(two, one), FEATURE_LEVEL)


@pytest.mark.parametrize(
    ("at", "reason"),
    [(0, "no snapshot of smq"), (4, "format 99.*run a newer smq"), (8, "feature level 99.*run a newer smq")],
)
def test_other_bytes_are_refused_with_the_reason(at: int, reason: str) -> None:
    damaged = bytearray(SNAPSHOT)
    damaged[at] = 99
    with pytest.raises(CodecError, match=reason):
        decode_state(damaged, FEATURE_LEVEL)


def test_rule_28_a_snapshot_of_a_build_that_had_two_modes_is_refused_and_says_what_to_do() -> None:
    older = bytearray(SNAPSHOT)
    older[4] = 1
    with pytest.raises(CodecError, match=r"before the first release.*start with an empty one"):
        Machine.restore(bytes(older))


def test_snapshot_of_version_2_has_the_bytes_of_the_fixture() -> None:
    """From the first release on the fixture stays as it is: a changed format gets a new version and a fixture of its
    own."""
    fixture = life.snapshot_of(life.transcript("level_1"))
    assert fixture == SNAPSHOT
    assert Machine.restore(fixture).state == life.end_of_life().state


def test_the_life_fills_every_part_of_the_state() -> None:
    state = life.end_of_life().state
    empty = ClusterState()
    assert [name.name for name in fields(state) if getattr(state, name.name) == getattr(empty, name.name)] == [
        "feature_level",
        "assigned_before",  # only once ASSIGNED_MAX answers are known
    ]
    assert state.nodes[NodeId(3)].rack == "süd"
    assert (state.generation_floor, state.groups["again"].generation) == (2, 3)
