"""Seeds of the Raft simulation, its repeatability, and proof that it notices each repair that is taken out."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from chaos_tests.sim.hunt import GROUP_BUGS, hunt
from chaos_tests.sim.raft import planted
from chaos_tests.sim.raft.group import Plan, Violation, World
from chaos_tests.sim.raft.planted import GroupBug
from chaos_tests.sim.raft.seeds import run
from smq.replication.ports import DataDamaged
from tests.unit.replication.raft.test_raft import calm, commands, commit, elected, followers, isolate, propose, wait


@pytest.mark.parametrize("seed", range(20))
def test_three_nodes_lose_nothing(seed: int) -> None:
    assert run(Plan(seed=seed, faults_ms=4_000)).acked


@pytest.mark.parametrize("seed", range(100, 106))
def test_five_nodes_lose_nothing(seed: int) -> None:
    assert run(Plan(seed=seed, nodes=5, faults_ms=4_000)).acked


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [3, 5])
@pytest.mark.parametrize("block", range(8))
def test_nothing_is_lost_in_many_more_seeds(nodes: int, block: int) -> None:
    for seed in range(1_000 + 25 * block, 1_000 + 25 * (block + 1)):
        run(Plan(seed=seed, nodes=nodes))


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    imports = "from chaos_tests.sim.raft.group import Plan; from chaos_tests.sim.raft.seeds import run"
    program = f"{imports}; print(run(Plan(seed=7)).digest.hexdigest())"
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        outputs.add(done.stdout.strip())
    assert len(outputs) == 1
    assert run(Plan(seed=7)).digest.hexdigest().encode() in outputs


# ------------------------------------------------------------------------------------------------- planted bugs
@pytest.mark.parametrize("bug", GROUP_BUGS, ids=lambda b: b.name)
def test_a_planted_bug_is_found(bug: GroupBug) -> None:
    assert hunt(bug).seed is not None


@pytest.mark.parametrize("bug", GROUP_BUGS, ids=lambda b: b.name)
def test_the_same_hunt_finds_nothing_if_nothing_is_planted(bug: GroupBug) -> None:
    assert bug.plan is not None
    for seed in (1, 2):
        run(replace(bug.plan, seed=seed, inspects_wire=True))


@pytest.mark.parametrize("bug", ["no-barrier", "ack-before-durable"])
def test_on_the_wire_a_missing_barrier_is_seen_immediately(bug: str) -> None:
    with planted.BUGS[bug].planted(), pytest.raises(Violation, match="on its disk"):
        run(Plan(seed=1, disk_latency_ms=(1.0, 25.0)))


# --------------------------------------------------------------------------------------------- hand-built traces
def rejoin_with_a_long_tail() -> None:
    """Finding 4: a deposed leader with a longer, uncommitted log meets a snapshot that ends inside that log."""
    world = calm(snapshot_entries=20)
    old = elected(world)
    isolate(world, old)
    for n in range(200):
        propose(old, f"divergent {n}")
    wait(world, lambda: world.leader() not in (None, old) and not old.engine.is_leader)
    new = world.leader()
    assert new is not None
    for n in range(60):
        commit(world, new, f"{n}")
    assert new.engine.journal.first_index < old.engine.journal.last_index
    world.network.heal_all()
    wait(world, lambda: old.fatal != [] or commands(old) == commands(new))
    for error in old.fatal:
        raise error


def test_a_snapshot_does_not_commit_a_tail_that_was_never_compared() -> None:
    rejoin_with_a_long_tail()


def test_a_snapshot_that_commits_an_uncompared_tail_is_found() -> None:
    with planted.BUGS["no-snapshot-clamp"].planted(), pytest.raises(Violation, match="applied divergent"):
        rejoin_with_a_long_tail()


def install_with_crashes(world: World) -> None:
    """A follower that missed a snapshot loses power at every step of getting it."""
    leader = elected(world)
    away = followers(world, leader)[0]
    away.crash(silently=False)
    for n in range(60):
        commit(world, leader, f"{n}")
    for step in range(1, 40):
        away.start()
        away.steps_left = step
        world.run_ms(300, stop=lambda: not away.is_up)
        away.crash(silently=False)
    away.start()
    wait(world, lambda: commands(away) == commands(leader))


def installs_with_crashes(seeds: int) -> None:
    for seed in range(seeds):
        install_with_crashes(calm(snapshot_entries=20, seed=seed))


def test_an_install_survives_a_crash_at_every_step() -> None:
    installs_with_crashes(3)


def test_an_install_in_two_submissions_is_found() -> None:
    with planted.BUGS["install-not-atomic"].planted(), pytest.raises(DataDamaged):
        installs_with_crashes(60)
