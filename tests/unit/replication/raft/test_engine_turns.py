"""How much one turn of the engine does, and when the next snapshot is due."""

import pytest

from smq.raft_state.ids import LogIndex
from smq.raft_state.replies import Applied
from smq.replication.raft import applier
from smq.replication.raft import core as raft_core
from smq.replication.raft import follower as raft_follower
from smq.replication.raft.messages import Append
from tests.unit.replication.raft.test_raft import calm, commands, commit, elected, followers, isolate, propose, wait
from tests.unit.replication.raft.test_roles import SNAPSHOT, A, installing


def test_a_node_that_took_a_snapshot_over_counts_what_its_journal_grows_by_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applier, "SNAPSHOT_JOURNAL_BYTES", 2_000)
    monkeypatch.setattr(raft_core, "JOURNAL_KEPT_BYTES", 0)
    world = calm(snapshot_entries=100_000)  # only the bytes count
    leader = elected(world)
    away = followers(world, leader)[0]
    commit(world, leader, "x" * 10_000)  # still in its journal, as it had not been applied, when that was cut
    wait(world, lambda: away.engine.journal.snapshot is not None)
    away.engine.journal._bytes_at_snapshot = 10_000
    isolate(world, away)
    for n in range(30):
        commit(world, leader, f"{n}" + "x" * 200)
    world.network.heal_all()
    wait(world, lambda: commands(away) == commands(leader))
    installed = away.engine.journal.snapshot
    assert installed is not None
    for n in range(30):
        commit(world, leader, f"{n}" + "y" * 200)
    wait(world, lambda: commands(away) == commands(leader))
    wait(world, lambda: away.engine.journal.snapshot.index > installed.index)  # type: ignore[union-attr]  # there is one


def test_entries_are_applied_by_size_some_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 entries that commit 10,000 offsets each, applying takes seconds."""
    monkeypatch.setattr(applier, "APPLY_BYTES_MAX", 1_000)
    world = calm(snapshot_entries=100_000)
    leader = elected(world)
    away = followers(world, leader)[0]
    isolate(world, away)
    answers = [propose(leader, "x" * 100) for _ in range(300)]
    wait(world, lambda: all(answers))
    applied = away.history.apply
    in_a_turn, turns = 0, list[int]()

    def apply(index: LogIndex, command: bytes) -> Applied:
        nonlocal in_a_turn
        in_a_turn += 1
        return applied(index, command)

    turn = away.engine._turn

    def counted() -> None:
        nonlocal in_a_turn
        in_a_turn = 0
        turn()
        turns.append(in_a_turn)

    monkeypatch.setattr(away.history, "apply", apply)
    monkeypatch.setattr(away.engine, "_turn", counted)
    world.network.heal_all()
    wait(world, lambda: commands(away) == commands(leader))
    assert 1 < max(turns) <= 9  # of some 110 bytes each


def test_messages_that_came_during_an_installation_are_taken_in_slices_and_before_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raft_follower, "HELD_ENTRIES_PER_TURN", 10)
    view, follower = installing(SNAPSHOT)

    def come(first: int) -> None:
        for index in range(first, first + 3 * 20, 3):
            entries = [(5, index.to_bytes(2, "big")) for index in range(index, index + 3)]
            prev = {"prev_index": index - 1, "prev_term": 4 if index == 10 else 5}
            follower.on_append(A, Append(term=5, number=index, commit=9, **prev, entries=entries))

    come(10)
    view.finish_install()
    turns = list[int]()
    while follower.has_held:
        before = view.journal.last_index
        follower.take_held()
        turns.append(view.journal.last_index - before)
        if len(turns) == 1:
            come(70)  # a turn later: it must not overtake
    assert sum(turns) == 120
    assert max(turns) <= 10 + 3  # a message is taken as a whole
    entries = view.journal.entries_from(10, count_max=120)
    assert [entry for entry, _, _ in entries] == [index.to_bytes(2, "big") for index in range(10, 130)]
