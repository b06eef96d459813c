"""A leader that has been deposed without knowing it: its log is no judge of which batches are missing."""

from typing import Any

import pytest

from chaos_tests.sim.cluster import SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks, Produced

pytestmark = pytest.mark.sim


class World:
    """Three nodes, a partition, and an idempotent producer."""

    def __init__(self) -> None:
        self.simulation = Simulation(find("calm"), 1)
        assert self.simulation._boot()
        self.simulation.scheduler.run_for_ms(1_000)
        (self.known, *_) = self.simulation.world.partitions

    def leaders(self) -> list[SimHost]:
        """The nodes that believe that they lead the partition."""
        return [h for h in self.simulation.cluster.up() if any(r.pid == self.known.pid for r in h.api.replicas.led())]

    def produce(self, host: SimHost, sequence: int) -> list[Any]:
        answers: list[Any] = []
        batch = encode_batch([NewRecord(None, b"v", 1)], producer_id=7, producer_epoch=0, base_sequence=sequence)
        host.api.produce(self.known.topic, self.known.index, batch, Acks.ALL, 5_000, answers.append)
        return answers

    def answer(self, answers: list[Any]) -> Any:
        assert self.simulation.scheduler.run_for_ms(6_000, stop=lambda: bool(answers))
        return answers[0]


def test_a_deposed_leader_does_not_say_that_a_batch_is_missing() -> None:
    world = World()
    (old,) = world.leaders()
    assert isinstance(world.answer(world.produce(old, 0)), Produced)
    network = world.simulation.cluster.network
    others = [h for h in world.simulation.cluster.up() if h is not old]
    for other in others:
        network.cut(old.node, other.node)
        network.cut(other.node, old.node)
    assert world.simulation.scheduler.run_for_ms(5_000, stop=lambda: len(world.leaders()) == 2)
    (new,) = [h for h in world.leaders() if h is not old]
    assert isinstance(world.answer(world.produce(new, 1)), Produced)
    answers = world.produce(old, 2)  # it lacks sequence 1
    network.heal_all()
    error = world.answer(answers)
    assert isinstance(error, SmqError)
    assert error.code.is_retriable
    assert error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_the_present_leader_says_that_a_batch_is_missing() -> None:
    world = World()
    (leader,) = world.leaders()
    assert isinstance(world.answer(world.produce(leader, 0)), Produced)
    error = world.answer(world.produce(leader, 2))
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE
