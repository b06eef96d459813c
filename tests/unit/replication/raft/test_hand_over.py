"""Handing over Raft's leadership: TimeoutNow goes again to a successor that was not ready for the first."""

import pytest

from smq.replication.raft.messages import NO_ANSWER, Append, Message, TimeoutNow
from tests.unit.replication.raft.test_raft import calm, elected, followers, isolate, propose, wait
from tests.unit.replication.raft.test_roles import DISK, A, View, leading, success


def words(view: View) -> int:
    """How many TimeoutNow the successor got."""
    return sum(peer == A and isinstance(message, TimeoutNow) for peer, message in view.sent)


def test_the_successor_is_told_once_it_has_all_and_again_with_each_heartbeat_until_the_time_is_over() -> None:
    view, lead = leading(1, 1, term=1)
    view.disks = {A: DISK}
    lead.on_reply(A, success(view, 1, 2))
    lead.hand_over(A)
    lead.send()
    assert words(view) == 0
    lead.on_reply(A, success(view, 2, 3))
    for told in (1, 2, 3):
        lead.send()
        lead.send()
        assert words(view) == told
        view.time += view.timing.heartbeat_ms / 1000
    view.time += view.timing.election_timeout_min_ms / 1000
    lead.send()
    assert words(view) == 3


def test_a_successor_stands_that_learns_of_a_commit_together_with_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm()
    leader = elected(world)
    world.run_ms(200)
    to, away = followers(world, leader)
    isolate(world, away)  # so that the successor's answer commits the entry
    assert to.engine._core is not None

    def is_due_for(_peer: object, message: Message) -> bool:
        """The commit index alone waits for the next message. In a node, one frame brings both."""
        return not (isinstance(message, Append) and message.number == NO_ANSWER)

    monkeypatch.setattr(to.engine._core, "is_due_for", is_due_for)
    propose(leader, "a")
    world.run_ms(0.05)
    leader.engine.transfer_leadership(to.node)
    wait(world, lambda: to.engine.is_leader, ms=300)
