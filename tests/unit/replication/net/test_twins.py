"""Two processes with one node id, without sockets: which of them must end, and when neither must."""

import itertools

from smq.raft_state.ids import NodeId
from smq.replication.net import twins as rule
from smq.replication.net.twins import RETURNS_MAX, Twins
from smq.replication.ports import Channel

ONE = NodeId(1)
ROUNDS = 2 * RETURNS_MAX - 1  # each of the two returns in every second one
EARLIER, LATER, THIRD = b"1" * 16, b"2" * 16, b"3" * 16


def test_a_process_that_comes_in_the_place_of_one_at_home_is_contested_while_that_is_connected() -> None:
    twins = Twins()
    assert not twins.is_contested(ONE, LATER, [EARLIER]), "there was no answer at that address yet"
    twins.found(ONE, EARLIER)
    assert twins.is_contested(ONE, LATER, [EARLIER])
    assert not twins.is_contested(ONE, EARLIER, [EARLIER])
    assert not twins.is_contested(ONE, LATER, []), "a restart, after which the old connections are gone"
    assert not twins.is_contested(ONE, LATER, [THIRD])


def test_processes_that_follow_each_other_are_restarts() -> None:
    twins = Twins()
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert twins.loser(ONE, older, newer) is None
    assert len(twins._returns[ONE]) == rule._REPLACED_KEPT


def test_late_connections_around_many_restarts_never_add_up() -> None:
    twins = Twins()
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert twins.loser(ONE, older, newer) is None
        for _channel in Channel:
            assert twins.loser(ONE, newer, older) is None, "a late connection"
            assert twins.loser(ONE, older, newer) is None, "it is back"


def test_a_late_connection_of_a_process_that_has_ended_proves_nothing() -> None:
    twins = Twins()
    assert twins.loser(ONE, EARLIER, LATER) is None
    assert twins.loser(ONE, LATER, EARLIER) is None
    assert twins.loser(ONE, EARLIER, LATER) is None


def rounds_until_one_loses(twins: Twins) -> tuple[int, bytes]:
    older, newer = LATER, EARLIER
    for count in range(100):
        loser = twins.loser(ONE, older, newer)
        if loser is not None:
            return count, loser
        older, newer = newer, older
    raise AssertionError("both go on")


def test_of_two_that_take_turns_the_one_that_began_later_ends_whoever_judges() -> None:
    assert rounds_until_one_loses(Twins()) == (ROUNDS, LATER)


def test_after_a_verdict_the_returns_are_counted_anew() -> None:
    twins = Twins()
    assert [rounds_until_one_loses(twins) for _ in range(3)] == [(ROUNDS, LATER)] * 3


def test_of_two_that_take_turns_the_one_that_was_at_home_stays() -> None:
    twins = Twins()
    twins.found(ONE, LATER)
    assert rounds_until_one_loses(twins) == (ROUNDS, EARLIER)
