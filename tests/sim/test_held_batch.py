"""A batch whose topic a node has to look up first: a later one that finds the topic known does not overtake it."""

import pytest

from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import ClusterState, PartitionState
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks, NodeApi, Produced
from smq.replication.proposer import Barriers


class World:
    """A node that leads a partition, and batches for it."""

    def __init__(self) -> None:
        self.simulation = Simulation(find("calm"), 1)
        assert self.simulation._boot()
        self.simulation.scheduler.run_for_ms(1_000)
        (self.known, *_) = self.simulation.world.partitions
        up = self.simulation.cluster.up()
        self.api: NodeApi = next(h.api for h in up if any(r.pid == self.known.pid for r in h.api.replicas.led()))
        self.answers: dict[int, Produced | SmqError] = {}

    def produce(self, sequence: int, *, idempotent: bool = True) -> None:
        records = [NewRecord(None, b"v", 1)]
        batch = encode_batch(records)
        if idempotent:
            batch = encode_batch(records, producer_id=7, producer_epoch=0, base_sequence=sequence)

        def done(result: Produced | SmqError) -> None:
            self.answers[sequence] = result

        self.api.produce(self.known.topic, self.known.index, batch, Acks.ALL, 5_000, done)

    def offsets(self, *sequences: int) -> list[int]:
        """Where these batches were stored, once they are."""
        assert self.simulation.scheduler.run_for_ms(5_000, stop=lambda: self.answers.keys() >= set(sequences))
        results = [self.answers.pop(sequence) for sequence in sequences]
        assert all(isinstance(result, Produced) for result in results), results
        return [result.base_offset for result in results if isinstance(result, Produced)]


def _unknown(_self: ClusterState, _topic: str, _index: int) -> PartitionState | None:
    return None


@pytest.mark.parametrize("idempotent", [False, True])
def test_later_batches_come_after_those_that_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, *, idempotent: bool
) -> None:
    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(ClusterState, "partition_of", _unknown)
        world.produce(0, idempotent=idempotent)
        world.produce(1, idempotent=idempotent)
    world.produce(2, idempotent=idempotent)
    first = world.offsets(0)[0]
    assert world.offsets(1, 2) == [first + 1, first + 2]


def test_a_later_batch_of_the_producer_waits_for_one_whose_look_up_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(ClusterState, "partition_of", _unknown)
        patch.setattr(Barriers, "wait", lambda _self, _timeout_ms, done: done(SmqError(ErrorCode.NO_QUORUM, "none")))
        world.produce(0)
    world.produce(1)
    assert world.simulation.scheduler.run_for_ms(5_000, stop=lambda: len(world.answers) == 2)
    codes = [getattr(world.answers.pop(sequence), "code", None) for sequence in (0, 1)]
    assert codes == [ErrorCode.NO_QUORUM, ErrorCode.OVERLOADED]
    world.produce(0)
    world.produce(1)
    first, second = world.offsets(0, 1)
    assert second == first + 1
