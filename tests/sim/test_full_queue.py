"""A node that follows many partitions and whose disk hangs: its queue keeps to its bound, and all of them catch up."""

from dataclasses import replace

import pytest

from chaos_tests.sim.cluster import SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks, Produced, ProduceRequest

CAP = 64 << 10
WINDOW = 8 << 10  # of one partition's stream: an eighth of the cap, as by default
PARTITIONS = 18  # each node leads six and follows twelve
ROUNDS = 40
FRAME = WINDOW  # one Append message: several batches that were waiting


def simulation() -> Simulation:
    calm = find("calm")
    node = {"append_inflight_bytes_max": CAP, "replica_inflight_bytes_max": WINDOW}
    made = Simulation(replace(calm, cluster=replace(calm.cluster, partitions=PARTITIONS, node=node)), 1)
    assert made._boot()
    made.scheduler.run_for_ms(2_000)
    return made


def publish(made: Simulation, victim: SimHost, rounds: int) -> list[object]:
    """Batches of a kilobyte to every partition that the victim follows; their answers."""
    batch = encode_batch([NewRecord(None, b"v" * 1_000, 1)])
    answers: list[object] = []
    for _ in range(rounds):
        for host in made.cluster.up():
            for replica in host.api.replicas.led() if host is not victim else ():
                host.api.produce(ProduceRequest("t0-0", replica.part.index, batch, Acks.ALL, 20_000, answers.append))
        made.scheduler.run_for_ms(20)
    return answers


def ends(host: SimHost) -> dict[bytes, int]:
    return {status.pid: status.durable_end for status in host.api.replica_statuses()}


@pytest.mark.parametrize("is_everywhere", [False, True], ids=["one disk", "all disks"])
def test_the_records_that_wait_for_a_hung_disk_are_bounded_and_all_partitions_catch_up(is_everywhere: bool) -> None:
    made = simulation()
    hosts = list(made.cluster.hosts.values())
    victim = next(host for host in hosts if not host.api.engine.is_leader)
    assert len(victim.api.replicas.all()) - len(victim.api.replicas.led()) == 12
    for host in hosts if is_everywhere else [victim]:
        assert host.disk is not None
        host.disk.stall(5_000)
    answers = publish(made, victim, ROUNDS)
    made.scheduler.run_for_ms(1_000)
    assert victim.disk is not None
    assert victim.disk.queued_record_bytes_peak > CAP // 4, "the fault struck"
    for host in hosts:
        assert host.disk is not None
        assert host.disk.queued_record_bytes_peak <= CAP + FRAME
    if not is_everywhere:
        assert len(answers) == ROUNDS * 12, "a majority of the disks works"
    made.scheduler.run_for_ms(8_000)
    assert len(answers) == ROUNDS * 12
    assert is_everywhere or all(isinstance(answer, Produced) for answer in answers)
    made.scheduler.run_for_ms(3_000)
    assert ends(hosts[0]) == ends(hosts[1]) == ends(hosts[2])
    assert sum(ends(victim).values()) == sum(isinstance(answer, Produced) for answer in answers)
    for host in hosts:
        assert host.disk is not None
        assert host.disk.queued_record_bytes_peak <= CAP + FRAME
