"""Many producers retry together after their leader's death, in a whole cluster of production nodes."""

from collections.abc import Callable

from chaos_tests.sim.clients.base import Known
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch, parse_header
from smq.replication.api import Acks, Fetched, NodeApi, Produced

PRODUCERS = 1_500  # more than the table of earlier versions held per partition
TIMEOUT_MS = 5_000


def led(simulation: Simulation, known: Known) -> NodeApi | None:
    for host in simulation.cluster.up():
        status = host.api.replica_status(known.pid) if host.api is not None else None
        if status is not None and status.is_leader:
            api: NodeApi = host.api
            return api
    return None


def batch(producer: int) -> bytes:
    return encode_batch([NewRecord(None, b"%d" % producer, 1)], producer_id=producer, producer_epoch=0, base_sequence=0)


def produce_all(simulation: Simulation, known: Known, api: NodeApi) -> list[Produced]:
    """One batch of every producer, all at the same time."""
    answers: list[Produced | SmqError] = []
    for producer in range(PRODUCERS):
        api.produce(known.topic, known.index, batch(producer), Acks.ALL, TIMEOUT_MS, answers.append)
    assert simulation.scheduler.run_for_ms(TIMEOUT_MS, stop=lambda: len(answers) == PRODUCERS)
    stored = [answer for answer in answers if isinstance(answer, Produced)]
    assert len(stored) == PRODUCERS
    return stored


def read_all(simulation: Simulation, known: Known, api: NodeApi) -> list[int]:
    """The producers of the committed batches, in order."""
    found: list[int] = []
    fetched: list[Fetched | SmqError] = []

    def fetch() -> Callable[[], bool]:
        fetched.clear()
        offset = len(found)
        api.fetch(known.topic, known.index, offset, max_bytes=1 << 20, max_wait_ms=100, done=fetched.append)
        return lambda: bool(fetched)

    while True:
        assert simulation.scheduler.run_for_ms(TIMEOUT_MS, stop=fetch())
        (answer,) = fetched
        assert isinstance(answer, Fetched)
        if not answer.batches:
            return found
        found += [parse_header(stored.data).producer_id for stored in answer.batches]


def test_1500_producers_that_retry_after_the_leaders_death_store_every_batch_once() -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    known = simulation.world.partitions[0]
    assert simulation.scheduler.run_for_ms(TIMEOUT_MS, stop=lambda: led(simulation, known) is not None)
    first = led(simulation, known)
    assert first is not None
    before = produce_all(simulation, known, first)
    dead: NodeId = first.node_id
    simulation.cluster.crash(dead, power=False, why="test")
    assert simulation.scheduler.run_for_ms(20_000, stop=lambda: led(simulation, known) is not None)
    second = led(simulation, known)
    assert second is not None
    assert second.node_id != dead
    after = produce_all(simulation, known, second)
    assert all(answer.duplicate for answer in after)
    assert [answer.base_offset for answer in after] == [answer.base_offset for answer in before]
    assert sorted(read_all(simulation, known, second)) == list(range(PRODUCERS))
