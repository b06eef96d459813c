"""A batch whose topic a node has to look up first: a later one that finds the topic known does not overtake it."""

import pytest

from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.errors import SmqError
from smq.raft_state.state import ClusterState, PartitionState
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks, Produced


def sent(sequence: int) -> bytes:
    return encode_batch([NewRecord(None, b"v", 1)], producer_id=7, producer_epoch=0, base_sequence=sequence)


def test_a_later_batch_waits_for_one_that_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    simulation.scheduler.run_for_ms(1_000)
    (known, *_) = simulation.world.partitions
    api = next(h.api for h in simulation.cluster.up() if any(r.pid == known.pid for r in h.api.replicas.led()))
    answers: list[tuple[int, Produced | SmqError]] = []

    def produce(sequence: int) -> None:
        done = answers.append
        api.produce(known.topic, known.index, sent(sequence), Acks.ALL, 5_000, lambda result: done((sequence, result)))

    def unknown(_self: ClusterState, _topic: str, _index: int) -> PartitionState | None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(ClusterState, "partition_of", unknown)
        produce(0)
    produce(1)
    assert simulation.scheduler.run_for_ms(5_000, stop=lambda: len(answers) == 2)
    (refused, error), (first, produced) = answers
    assert (refused, first) == (1, 0)
    assert isinstance(error, SmqError)
    assert error.code.name == "OVERLOADED"
    assert isinstance(produced, Produced)
    produce(1)
    assert simulation.scheduler.run_for_ms(5_000, stop=lambda: len(answers) == 3)
    assert isinstance(answers[2][1], Produced)
