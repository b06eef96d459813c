"""A leader that hears no majority steps down, and has voted in that term nevertheless."""

from tests.unit.replication.raft.test_engine import calm, elected, isolate, wait


def test_a_leader_that_steps_down_does_not_vote_again_in_its_term() -> None:
    world = calm(3)
    leader = elected(world)
    term = leader.engine.term
    isolate(world, leader)
    wait(world, lambda: not leader.engine.is_leader)
    assert leader.engine.journal.term == term
    assert leader.engine.journal.voted_for == leader.node
