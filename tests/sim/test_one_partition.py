"""One partition alone: courses built by hand, bugs planted in them, and random schedules."""

from collections.abc import Callable

import pytest

from chaos_tests.sim.hunt import BY_HAND, hunt
from chaos_tests.sim.partition import courses
from chaos_tests.sim.partition.chance import Chance, play, run, shrink
from chaos_tests.sim.partition.group import Group
from chaos_tests.sim.partition.planted import COURSE_BUGS, CourseBug
from chaos_tests.sim.partition.planted import run as run_course
from chaos_tests.sim.partition.producer_truth import Violation
from chaos_tests.sim.planted.catalogue import find
from smq.raft_state.commands import ElectLeader
from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel, Table

pytestmark = pytest.mark.sim

COURSES = [
    value
    for name, value in vars(courses).items()
    if callable(value) and value.__module__ == courses.__name__ and not name.startswith("_")
]
NODES = {bug.course: bug.nodes for bug in COURSE_BUGS}


# ---------------------------------------------------------------------------------------------- courses
@pytest.mark.parametrize("bug", COURSE_BUGS, ids=lambda b: b.name)
def test_a_course_finds_its_planted_bug(bug: CourseBug) -> None:
    assert hunt(bug).seed == BY_HAND


@pytest.mark.parametrize("course", COURSES, ids=lambda c: c.__name__)
def test_production_code_survives_the_course(course: Callable[[Group], None]) -> None:
    assert any(record.is_acked for record in run_course(course, NODES.get(course, 3)).records)


# ---------------------------------------------------------------------------------------------- random schedules
@pytest.mark.parametrize("block", range(8))
def test_random_schedules_break_no_promise(block: int) -> None:
    acked = sum(
        sum(r.is_acked for r in run(seed).group.records) for seed in range(25 * block + 1, 25 * (block + 1) + 1)
    )
    assert acked > 25


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(10))
def test_many_more_random_schedules_break_no_promise(block: int) -> None:
    for seed in range(1_000 + 1_000 * block, 1_000 + 1_000 * (block + 1)):
        run(seed)


@pytest.mark.parametrize("name", ["one-seal-elects", "sealed-leader-leads-on"])
def test_random_schedules_find_bugs_too_and_shrink_to_what_they_take(name: str) -> None:
    (bug,) = [b for b in COURSE_BUGS if b.name == name]
    with bug.planted():
        for seed in range(1, 300):
            chance = Chance(seed)
            try:
                chance.run()
            except Violation:
                break
        message, steps = shrink(seed)
        assert message
        assert len(steps) < len(chance.steps)
        with pytest.raises(Violation):
            chance.again(steps)


@pytest.mark.parametrize(
    "name",
    [
        "segment-taken-without-its-digest",
        "no-duplicate-check",
        "producers-not-rolled-back",
        "every-marker-commits",
        "open-transactions-are-stable",
    ],
)
def test_random_schedules_find_bugs_of_compaction_and_producers(name: str) -> None:
    with find(name).planted():
        assert any(_breaks(seed) for seed in range(1, 200))


def _breaks(seed: int) -> bool:
    try:
        run(seed)
    except Violation:
        return True
    return False


def test_a_schedule_takes_the_same_course_again() -> None:
    one, other = Chance(7), Chance(7)
    one.run()
    other.run()
    assert one.steps == other.steps
    again = Chance(7)
    again.again(one.steps)


# ---------------------------------------------------------------------------------------------- the judge
def test_a_record_on_two_of_three_disks_is_acknowledged_and_stays() -> None:
    group = Group()
    record = group.produce(1)
    group.exchange(1, 2)
    assert record is not None
    assert (record.is_acked, group.truth.end, group.part.hwm) == (True, 1, 0)
    group.crash(1)
    assert not group.elect(3), "one seal of three"
    assert group.elect(2, 3)
    assert (group.part.leader, group.part.history[-1].start) == (2, 1)
    group.heal()


@pytest.mark.parametrize("why", ["sealed", "lost"])
def test_producers_wait_for_a_moment_only_where_a_small_append_gets_no_answer(why: str) -> None:
    """Both followers have sealed the epoch meanwhile, or the frame was refused and its session stays."""
    group = Group(seed=1)
    group.exchange(1, 2, 3)
    group.produce(1)
    group.exchange(1, 2, 3)
    if why == "sealed":
        group.hold_disk(2)
        group.hold_disk(3)
        group.produce(1)
        group.run(1)
        for node in (2, 3):
            group.deliver(1, node)
            group.seal(node)
            group.free_disk(node)
            group.deliver(node, 1)
    else:
        group.produce(1)
        group.run(1)
        for node in (2, 3):
            group.sent.pop((NodeId(1), NodeId(node), Channel.DATA), None)
    leader = group.member(1)
    before_ns = leader.clock.monotonic_ns()
    for _ in range(200):
        group.produce(1)
        group.exchange(1, 2, 3, turns=1)
        group.tick(1, 5.0)
        group.exchange(1, 2, 3, turns=1)
        if why == "sealed":
            is_over = any(isinstance(p.command, ElectLeader) and p.node == 1 for p in group.proposals)
        else:
            assert leader.replica is not None
            is_over = leader.replica.known_commit_point() >= 4
        if is_over:
            break
    assert is_over
    assert leader.clock.monotonic_ns() - before_ns < 300_000_000  # of virtual time; its probe comes after a second


def test_a_partition_that_cannot_work_again_is_a_violation() -> None:
    group = Group()
    play(group, [("produce", (1, 1)), ("exchange", (1, 2))])
    for node in (1, 2):
        group.crash(node)
        group.member(node).image = type(group.member(node).image)()  # two of three disks are gone, unnoticed
    with pytest.raises(Violation):
        group.heal()


def test_the_last_record_of_a_key_must_stay() -> None:
    with (
        find("last-record-of-a-key-removed").planted(),
        pytest.raises(Violation, match="is the last of its key, and is gone"),
    ):
        run_course(courses.older_segment_is_offered_after_a_start)


def test_disks_that_differ_after_everything_has_arrived_are_a_violation() -> None:
    group = Group()
    play(group, [("produce", (1, 1)), ("exchange", (1, 2, 3))])
    rows = group.member(3).disk.image.tables[Table.BATCHES]
    del rows[next(key for key in rows if key.startswith(group.pid))]
    with pytest.raises(Violation, match="the disks differ"):
        group.heal()
