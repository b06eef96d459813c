"""A follower that takes longer to receive and install a snapshot than the leader takes for the next ones."""

import pytest

from chaos_tests.sim.raft.group import Host
from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel
from smq.replication.raft import core as raft_core
from smq.replication.raft.messages import SnapshotChunk, decode
from tests.unit.replication.raft.test_raft import calm, commands, commit, elected, followers, isolate, wait

SNAPSHOT_ENTRIES = 20


class SlowFollower:
    """It lacks more than the leader's journal holds. From the snapshot on, it gets the leader's messages at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = calm(snapshot_entries=SNAPSHOT_ENTRIES)
        self.leader = elected(self.world)
        self.host: Host = followers(self.world, self.leader)[0]
        self.snapshots: set[int] = set()  # that it was sent
        self._held: list[tuple[NodeId, Channel, memoryview]] = []
        self._is_held = True
        self._deliver = self.host.on_message
        self.host.crash(silently=False)
        self.commit(100)
        monkeypatch.setattr(self.host, "on_message", self._on_message)
        self.host.start()
        wait(self.world, lambda: bool(self.snapshots))

    def _on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        message = decode(payload)
        if isinstance(message, SnapshotChunk):
            self.snapshots.add(message.index)
        if self.snapshots and self._is_held and peer == self.leader.node:
            self._held.append((peer, channel, memoryview(bytes(payload))))
        else:
            self._deliver(peer, channel, payload)

    @property
    def kept(self) -> int:
        return len(self.leader.engine.journal)

    def commit(self, count: int) -> None:
        for n in range(count):
            commit(self.world, self.leader, f"{n}")

    def catch_up(self, behind: int) -> None:
        """Until it lacks no more than that many entries."""
        while len(commands(self.host)) < len(commands(self.leader)) - behind:
            if self._held:
                self._deliver(*self._held.pop(0))
            self.world.run_ms(2)

    def go_on(self) -> None:
        self._is_held = False
        for message in self._held:
            self._deliver(*message)
        wait(self.world, lambda: commands(self.host) == commands(self.leader))


def test_it_needs_no_second_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)  # no entry is sent before the answer
    slow = SlowFollower(monkeypatch)
    taken = slow.leader.engine.snapshot
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.leader.engine.snapshot > taken
    slow.go_on()
    assert len(slow.snapshots) == 1


def test_once_it_has_caught_up_the_journal_is_cut_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowFollower(monkeypatch)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.kept > 10 * SNAPSHOT_ENTRIES
    slow.go_on()
    slow.commit(2 * SNAPSHOT_ENTRIES)
    assert slow.kept < 3 * SNAPSHOT_ENTRIES


def test_what_was_kept_for_it_does_not_count_once_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some entries stay before each snapshot, for followers that are a little behind, unless they are large."""
    monkeypatch.setattr(raft_core, "JOURNAL_KEPT_BYTES", 100)
    slow = SlowFollower(monkeypatch)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    slow.go_on()
    engine = slow.leader.engine
    taken = engine.snapshot[0]
    while engine.snapshot[0] == taken:
        slow.commit(1)
    assert engine.journal.first_index == engine.snapshot[0] - SNAPSHOT_ENTRIES // 4


@pytest.mark.parametrize(("bound", "most"), [("CATCH_UP_ENTRIES", 60), ("CATCH_UP_BYTES", 200)])
def test_it_gets_another_before_the_journal_grows_without_bound(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_core, bound, most)
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)
    slow = SlowFollower(monkeypatch)
    longest = 0
    for _ in range(10 * SNAPSHOT_ENTRIES):
        slow.commit(1)
        longest = max(longest, slow.kept)
    assert longest < 6 * SNAPSHOT_ENTRIES
    slow.go_on()
    assert len(slow.snapshots) > 1


@pytest.mark.parametrize(("bound", "most"), [("CATCH_UP_ENTRIES", 60), ("CATCH_UP_BYTES", 140)])
def test_what_it_has_does_not_count_towards_the_bound(bound: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that stays a few entries behind a busy leader: it needs few of those after its snapshot."""
    monkeypatch.setattr(raft_core, bound, most)
    monkeypatch.setattr("smq.replication.raft.leader.APPEND_BYTES_MAX", 1)  # one entry per message,
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)  # and none before the answer
    slow = SlowFollower(monkeypatch)
    slow.commit(50)
    for _ in range(2 * SNAPSHOT_ENTRIES):
        slow.commit(1)
        slow.catch_up(SNAPSHOT_ENTRIES // 2)
    slow.go_on()
    assert len(slow.snapshots) == 1


def test_nothing_is_kept_for_one_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowFollower(monkeypatch)
    isolate(slow.world, slow.host)
    leading = slow.leader.engine._core
    assert leading is not None
    wait(slow.world, lambda: not leading.is_connected(slow.host.node), ms=20_000)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.kept < 3 * SNAPSHOT_ENTRIES
