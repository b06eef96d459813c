"""Who moves the clock of expiry, how often, and with which measurement."""

from dataclasses import replace
from typing import cast

import pytest

from smq.raft_state.commands import AdvanceClock, AlterTopicConfig, Command
from smq.raft_state.errors import SmqError
from smq.raft_state.limits import PRODUCER_EXPIRATION_MS_MIN
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.nodes.expiry_clock import INTERVAL_MS_MAX, INTERVAL_MS_MIN, ExpiryClock, interval_ms
from smq.replication.raft.raft import Raft
from tests.unit.raft_state.support import init_transactions, kept_minutes, producers_kept_ms, proposed, settings
from tests.unit.replication.support import Host

BEAT_MS = 1_000


class ScriptedRaft:
    is_leader = True


class Node:
    """One node's expiry clock over a real machine; commands are applied immediately unless they are `lost`."""

    def __init__(self) -> None:
        self.host = Host()
        self.raft = ScriptedRaft()
        self.proposed: list[AdvanceClock] = []
        self.waiting: list[DoneFn[Reply]] = []
        self.is_lost = False
        self.clock = ExpiryClock(replace(self.host.node_host(), engine=cast(Raft, self.raft), propose=self._propose))

    def _propose(self, command: Command, _timeout_ms: int, done: DoneFn[Reply]) -> None:
        assert isinstance(command, AdvanceClock)
        self.proposed.append(command)
        if self.is_lost:
            self.waiting.append(done)
        else:
            done(self.host.apply(command))

    def run(self, ms: int) -> None:
        for _ in range(ms // BEAT_MS):
            self.host.settle(BEAT_MS)
            self.clock.on_beat()

    @property
    def now_ms(self) -> int:
        return self.host.state.expiry_clock_ms


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_first_step_comes_immediately_and_then_one_every_ten_minutes(node: Node) -> None:
    node.run(2 * INTERVAL_MS_MAX + 10_000)
    assert [step.seen_ms == 0 for step in node.proposed] == [True, False, False]
    first, second, third = node.proposed
    assert first.now_ms == second.seen_ms
    assert INTERVAL_MS_MAX <= second.elapsed_ms < INTERVAL_MS_MAX + 2 * BEAT_MS
    assert node.now_ms == third.now_ms


def test_only_the_raft_leader_proposes(node: Node) -> None:
    node.raft.is_leader = False
    node.run(2 * INTERVAL_MS_MAX)
    assert node.proposed == []


def test_the_clock_moves_although_offsets_are_kept_for_ever(node: Node) -> None:
    node.host.apply(kept_minutes(0))
    node.host.apply(producers_kept_ms(PRODUCER_EXPIRATION_MS_MIN))
    assert interval_ms(node.host.state) == PRODUCER_EXPIRATION_MS_MIN // 4
    node.run(PRODUCER_EXPIRATION_MS_MIN)
    assert len(node.proposed) == 4


def test_a_topic_that_keeps_its_records_for_less_gives_the_interval(node: Node) -> None:
    node.host.create_partition()
    node.host.configure(retention_ms="20000")
    assert interval_ms(node.host.state) == 5_000
    node.host.configure(retention_ms="1")
    assert interval_ms(node.host.state) == INTERVAL_MS_MIN
    node.host.apply(AlterTopicConfig(name="t", set_=(("retention.records", "1"),), unset=("retention.ms",)))
    assert interval_ms(node.host.state) == INTERVAL_MS_MAX


def test_transactional_ids_that_are_soon_forgotten_give_the_interval_while_there_are_any(node: Node) -> None:
    node.host.apply(settings(transactional_id_expiration_ms=20_000))
    assert interval_ms(node.host.state) == INTERVAL_MS_MAX
    node.host.apply(proposed(node.host.state, init_transactions("t")))
    assert interval_ms(node.host.state) == 5_000


@pytest.mark.parametrize(("minutes", "interval"), [(1, 15_000), (2, 30_000), (10_000_000, INTERVAL_MS_MAX)])
def test_the_shortest_retention_gives_the_interval(node: Node, minutes: int, interval: int) -> None:
    node.host.apply(kept_minutes(minutes))
    assert interval_ms(node.host.state) == interval


def test_a_step_is_measured_from_the_last_change_that_was_seen_here(node: Node) -> None:
    """A new leader has measured, too: a change of leaders costs no time and gains none."""
    node.run(BEAT_MS)
    node.raft.is_leader = False
    node.run(INTERVAL_MS_MAX // 2)
    before = node.now_ms
    node.host.apply(AdvanceClock(seen_ms=before, elapsed_ms=1_000, now_ms=before + 1_000))
    node.raft.is_leader = True
    node.run(INTERVAL_MS_MAX - 10_000)
    assert len(node.proposed) == 1
    node.run(20_000)
    assert abs(node.proposed[1].elapsed_ms - INTERVAL_MS_MAX) <= 2 * BEAT_MS


def test_a_step_without_an_answer_is_not_proposed_twice_at_a_time(node: Node) -> None:
    node.is_lost = True
    node.run(20_000)
    assert len(node.proposed) == 1
    node.waiting[0](cast(SmqError, None))
    node.run(2 * BEAT_MS)
    assert len(node.proposed) == 2
