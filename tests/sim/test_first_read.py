"""The first read of a leadership: its index is of an entry that holds no command, and must be told of as applied."""

from chaos_tests.sim.cluster import SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.ids import LogIndex


def test_a_new_leaders_first_read_waits_for_its_empty_entry_and_no_longer() -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    hosts = simulation.cluster.hosts
    (old,) = [host.node for host in hosts.values() if host.api.engine.is_leader]
    simulation.cluster.crash(old, power=False, why="test")
    led: list[SimHost] = []

    def has_leader() -> bool:
        led[:] = [host for host in simulation.cluster.up() if host.api.engine.is_leader]
        return bool(led)

    assert simulation.scheduler.run_for_ms(5_000, stop=has_leader)
    api = led[0].api
    assert api.engine.applied_index < api.engine.journal.last_index, "its first entry is not applied yet"
    told: list[int] = []
    tell = api._proposer.on_applied

    def listen(index: LogIndex) -> None:
        told.append(index)
        tell(index)

    api._proposer.on_applied = listen
    answers: list[int] = []
    api.barrier(5_000, answers.append)
    assert simulation.scheduler.run_for_ms(500, stop=lambda: bool(answers))
    # Where nothing follows, a wait that is not told of this entry ends with the next attempt only, a second later.
    assert answers[0] in told
