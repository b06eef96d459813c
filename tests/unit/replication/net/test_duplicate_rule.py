"""Two processes with one node id, without sockets: which of them must end, and when neither must."""

import itertools

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.net import duplicates
from smq.replication.net.duplicates import RETURNS_MAX, DuplicateRule
from smq.replication.ports import Channel

ONE = NodeId(1)
ROUNDS = 2 * RETURNS_MAX - 1  # each of the two returns in every second one
EARLIER, LATER, THIRD = b"1" * 16, b"2" * 16, b"3" * 16


@pytest.fixture
def rule() -> DuplicateRule:
    return DuplicateRule()


def test_a_process_that_comes_in_the_place_of_one_at_the_address_is_contested_while_that_is_connected(
    rule: DuplicateRule,
) -> None:
    assert not rule.is_contested(ONE, LATER, [EARLIER]), "there was no answer at that address yet"
    rule.found(ONE, EARLIER)
    assert rule.is_contested(ONE, LATER, [EARLIER])
    assert not rule.is_contested(ONE, EARLIER, [EARLIER])
    assert not rule.is_contested(ONE, LATER, []), "a restart, after which the old connections are gone"
    assert not rule.is_contested(ONE, LATER, [THIRD])


def test_processes_that_follow_each_other_are_restarts(rule: DuplicateRule) -> None:
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert rule.loser(ONE, older, newer) is None
    assert len(rule._returns[ONE]) == duplicates._REPLACED_KEPT


def test_late_connections_around_many_restarts_never_add_up(rule: DuplicateRule) -> None:
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert rule.loser(ONE, older, newer) is None
        for _channel in Channel:
            assert rule.loser(ONE, newer, older) is None, "a late connection"
            assert rule.loser(ONE, older, newer) is None, "it is back"


def test_a_late_connection_of_a_process_that_has_ended_proves_nothing(rule: DuplicateRule) -> None:
    assert rule.loser(ONE, EARLIER, LATER) is None
    assert rule.loser(ONE, LATER, EARLIER) is None
    assert rule.loser(ONE, EARLIER, LATER) is None


def rounds_until_one_loses(rule: DuplicateRule) -> tuple[int, bytes]:
    older, newer = LATER, EARLIER
    for count in range(100):
        loser = rule.loser(ONE, older, newer)
        if loser is not None:
            return count, loser
        older, newer = newer, older
    raise AssertionError("both go on")


def test_of_two_that_take_turns_the_one_that_began_later_ends_whoever_judges() -> None:
    assert rounds_until_one_loses(DuplicateRule()) == (ROUNDS, LATER)


def test_after_a_verdict_the_returns_are_counted_anew(rule: DuplicateRule) -> None:
    assert [rounds_until_one_loses(rule) for _ in range(3)] == [(ROUNDS, LATER)] * 3


def test_of_two_that_take_turns_the_one_that_was_at_the_address_stays(rule: DuplicateRule) -> None:
    rule.found(ONE, LATER)
    assert rounds_until_one_loses(rule) == (ROUNDS, EARLIER)
