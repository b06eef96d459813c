"""Seeds of the Raft simulation, its repeatability, and its power: each repair taken out must be noticed."""

import os
import subprocess
import sys
from typing import Any, Final

import pytest

from chaos_tests.sim.raft import planted
from chaos_tests.sim.raft.group import Plan, Violation, World, run
from smq.replication.ports import DataDamaged
from smq.replication.raft.engine_pysyncobj import EngineTiming
from smq.replication.raft.view import RaftViolation
from tests.unit.replication.raft.test_engine import calm, commands, commit, elected, followers, isolate, propose, wait

SEEDS_MAX: Final = 200  # each planted bug is found within 60 seeds; three times that is no luck any more


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
    program = "from chaos_tests.sim.raft.group import Plan, run; print(run(Plan(seed=7)).digest.hexdigest())"
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        outputs.add(done.stdout.strip())
    assert len(outputs) == 1
    assert run(Plan(seed=7)).digest.hexdigest().encode() in outputs


# ------------------------------------------------------------------------------------------------- planted bugs
SLOW_DISK: Final = (1.0, 25.0)
HUNTS: Final[dict[str, dict[str, Any]]] = {
    "no-barrier": {"only": ("crash_one", "crash_all", "isolate"), "disk_latency_ms": SLOW_DISK},
    "ack-before-durable": {"only": ("crash_one", "crash_all"), "disk_latency_ms": SLOW_DISK},
    "self-count-before-durable": {"only": ("crash_one", "isolate"), "disk_latency_ms": (1.0, 120.0)},
    "truncate-without-conflict": {"only": ("crash_one", "isolate", "break_session")},
    "unconfirmed-read": {"only": ("isolate", "pause", "cut_one_way")},
    "duplicate-votes": {"only": ("crash_one", "isolate", "pause"), "nodes": 5, "repeats_votes": True},
}


def hunt(seeds: int, **fields: Any) -> None:
    """Until the first seed that fails."""
    for seed in range(seeds):
        run(Plan(**{"seed": seed, "faults_ms": 4_000} | fields))


@pytest.mark.parametrize("bug", HUNTS)
def test_a_planted_bug_is_found(bug: str) -> None:
    """Without looking at the wire: by what it does to acknowledged commands, terms and histories."""
    with planted.BUGS[bug](), pytest.raises((Violation, RaftViolation)):
        hunt(SEEDS_MAX, inspects_wire=False, **HUNTS[bug])


@pytest.mark.parametrize("bug", HUNTS)
def test_the_same_hunt_finds_nothing_where_nothing_is_planted(bug: str) -> None:
    hunt(2, **HUNTS[bug])


def test_a_leader_that_forgets_its_vote_when_it_steps_down_is_found() -> None:
    with planted.BUGS["forgotten-vote"](), pytest.raises(ValueError, match="vote for None in term"):
        hunt(20, only=("isolate",))


@pytest.mark.parametrize("bug", ["no-barrier", "ack-before-durable"])
def test_on_the_wire_a_missing_barrier_is_seen_at_once(bug: str) -> None:
    with planted.BUGS[bug](), pytest.raises(Violation, match="on its disk"):
        run(Plan(seed=1, disk_latency_ms=SLOW_DISK))


def test_an_entry_applied_before_the_last_has_settled_is_found() -> None:
    with planted.BUGS["next-entry-too-early"](), pytest.raises(Violation, match="has settled"):
        run(Plan(seed=1))


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
    with planted.BUGS["no-snapshot-clamp"](), pytest.raises(Violation, match="applied divergent"):
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
    with planted.BUGS["install-not-atomic"](), pytest.raises(DataDamaged):
        installs_with_crashes(20)


def test_followers_that_install_no_snapshot_are_found() -> None:
    timing = EngineTiming(snapshot_entries=8)
    with planted.BUGS["no-snapshots"](), pytest.raises(Violation, match=r"entries|no progress"):
        hunt(20, faults_ms=2_000, timing=timing)
