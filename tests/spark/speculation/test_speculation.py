"""Speculation on a real Spark cluster: two attempts of one task have staged their rows, and each row is there once."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.spark import steps
from tests.spark.killed_job import in_the_log
from tests.spark.speculation.job import ROWS, TASKS
from tests.spark.speculation.source import BEGUN, DONE
from tests.spark.speculation.standalone import HOSTS, PATIENCE_S, SpeculatingJob, armed, standalone
from tests.spark.support import numbered, open_transactions

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1200)]

Attempt = tuple[int, int, str]  # partition, number, host


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def job(root: Path) -> Iterator[SpeculatingJob]:
    with standalone(root) as master:
        job = SpeculatingJob(root, master)
        try:
            yield job
        finally:
            job.stop()


@pytest.mark.parametrize("is_race", [False, True], ids=["the second is done first", "both at the same time"])
@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_of_two_attempts_of_a_task_the_rows_of_one_are_visible(
    job: SpeculatingJob,
    root: Path,
    cluster: Cluster,
    servers: str,
    new_topic: Callable[..., str],
    publish: Callable[..., None],
    kind: str,
    is_race: bool,
) -> None:
    """The first attempt is held when it has staged everything. Then Spark kills it, or takes whichever is faster."""
    target = new_topic(2)
    options = {"servers": servers, "topic": target, "transactionTimeoutMs": "20000"}
    wanted = [b"%d" % n for n in range(ROWS)]
    if kind == "stream":
        options["source"] = new_topic(TASKS)
        for partition in range(TASKS):
            publish(options["source"], partition, numbered(ROWS // TASKS, first=partition * ROWS // TASKS))
        wanted = [b"v%d" % n for n in range(ROWS)]
    prepare(root)
    job.begin(**options)
    if is_race:
        wait_for("the other tasks", lambda: len(noted(root, DONE)) == TASKS - 1, PATIENCE_S)
        steps.arm(armed(root), steps.STAGED, "hold")
        wait_for("the second attempt", lambda: not armed(root).exists(), PATIENCE_S)
        steps.taken(armed(root)).unlink()
    job.wait_written()
    slow = slow_task(noted(root, BEGUN))
    assert [number for _, number, _ in slow] == [0, 1]
    assert {host for _, _, host in slow} == set(HOSTS)
    wait_for("what the other attempt has staged has ended", lambda: not open_transactions(cluster), PATIENCE_S)
    assert sorted(value for _, _, _, value in in_the_log(servers, target)) == sorted(wanted)


def prepare(root: Path) -> None:
    """The next attempt that has staged its rows is held. That of the last write is dead by now."""
    for what in (BEGUN, DONE):
        shutil.rmtree(root / what, ignore_errors=True)
    steps.taken(armed(root)).unlink(missing_ok=True)
    steps.arm(armed(root), steps.STAGED, "hold")


def noted(root: Path, what: str) -> list[Attempt]:
    names = sorted(path.name.split() for path in (root / what).glob("*"))
    return [(int(partition), int(number), host) for partition, number, host in names]


def slow_task(attempts: list[Attempt]) -> list[Attempt]:
    """Those of the one task that has more than one."""
    (partition,) = {partition for partition, number, _ in attempts if number}
    return [attempt for attempt in attempts if attempt[0] == partition]
