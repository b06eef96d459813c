"""The first read of a leadership: its index is of an entry without a command, which must be reported as applied too."""

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
    reported: list[int] = []
    report = api._proposer.on_applied

    def listen(index: LogIndex) -> None:
        reported.append(index)
        report(index)

    api._proposer.on_applied = listen
    answers: list[int] = []
    api.barrier(5_000, answers.append)
    assert simulation.scheduler.run_for_ms(500, stop=lambda: bool(answers))
    # If nothing follows this entry and it is not reported, the wait ends only with the next attempt, a second later.
    assert answers[0] in reported
