"""A topic copied into another by the sink, through kill -9 at every step of its protocol: each record once."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from smq.raft_state.ids import key_partition
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.spark.killed_job import PARTITIONS, Job, PublishFn, Row, in_the_log, publishing
from tests.spark.steps import COMMIT, STAGED, STEPS, TASK
from tests.spark.support import open_transactions

log = logging.getLogger(__name__)  # --log-cli-level=INFO shows the kills; --junitxml=FILE keeps the counts
pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(3000)]

TopicFn = Callable[..., str]
TARGETS = 5  # each of the source's partitions has keys in most of these
BATCHES = 15  # between two deaths


def test_each_record_reaches_another_topic_once_through_deaths_at_every_step_of_the_sink(
    cluster: Cluster,
    servers: str,
    new_topic: TopicFn,
    publish: PublishFn,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The driver dies at each step in turn, then single tasks; meanwhile a leader is dead, or all nodes have been."""
    topic, target = new_topic(PARTITIONS), new_topic(TARGETS)
    job = Job(tmp_path, _options(servers, topic, target), ahead=2)
    nodes_killed = 0
    try:
        with publishing(publish, topic, pause_s=0.1):
            job.start()
            for number, step in enumerate(STEPS):
                job.wait_committed(job.committed() + BATCHES)
                killed, dead = _kill_nodes(cluster, target, number)
                nodes_killed += killed
                job.arm(step, "kill driver")
                job.wait_killed()
                log.info("killed in micro-batch %d: %s; dead nodes: %s", job.committed(), step, dead)
                job.start()
                cluster.restart(*dead)
            for step in ("PublishRecord answered", STAGED):
                job.arm(step, "kill task")
                job.wait_reached()
                job.wait_committed(job.committed() + BATCHES)
            job.kill()
        job.finish()
    finally:
        job.close()
        cluster.heal()
    assert job.committed() > 200
    read, written = _check_copied(cluster, servers, topic, target)
    kills = f"{len(STEPS)} deaths of the driver, 2 of a task, {nodes_killed} of a node"
    record_property("counts", f"{read} records in, {written} out, {job.committed()} micro-batches; {kills}")


def _options(servers: str, topic: str, target: str) -> dict[str, str]:
    reading = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "150"}
    return {"servers": servers, "target": target, **reading}


def _kill_nodes(cluster: Cluster, target: str, number: int) -> tuple[int, list[int]]:
    """Nothing, or a leader, or all nodes, which come back immediately. Returns how many, and those that stay dead."""
    dead = []
    if number % 3 == 1:
        dead.append(cluster.wait_leader(target, number % TARGETS))
        cluster.kill(*dead)
    elif number % 3 == 2:
        cluster.kill(*cluster.nodes)
        cluster.restart(*cluster.nodes)
        return len(cluster.nodes), []
    return len(dead), dead


def _check_copied(cluster: Cluster, servers: str, topic: str, target: str) -> tuple[int, int]:
    """Every record of one topic is in the other, once, in the order of its key; and nothing is left open. How many
    records there are in the one and in the other."""
    published, copied = in_the_log(servers, topic), in_the_log(servers, target)
    wanted = [(p, offset, key, b"%d %d %s" % (p, offset, value)) for p, offset, key, value in published]
    assert _by_key(copied) == _by_key(wanted)
    assert all(partition == key_partition(key, TARGETS) for partition, _, key, _ in copied)
    wait_for("nothing is staged any more", lambda: not open_transactions(cluster))
    return len(published), len(copied)


def _by_key(rows: Iterable[Row]) -> dict[bytes, list[bytes]]:
    """The values of each key, in the order of the log: a key is in one partition."""
    found: dict[bytes, list[bytes]] = {}
    for _, _, key, value in rows:
        found.setdefault(key, []).append(value)
    return found


def test_two_queries_with_one_checkpoint_are_fenced_and_not_interleaved(
    cluster: Cluster, servers: str, new_topic: TopicFn, publish: PublishFn, tmp_path: Path
) -> None:
    topic, target = new_topic(PARTITIONS), new_topic(TARGETS)
    options = _options(servers, topic, target)
    first, second = (Job(tmp_path, dict(options), name) for name in ("first", "second"))
    try:
        with publishing(publish, topic):
            _both_stage_one_batch(first, second)
            _one_begins_late(first, second)
    finally:
        first.close()
        second.close()
    first.finish()
    _check_copied(cluster, servers, topic, target)


def _both_stage_one_batch(first: Job, second: Job) -> None:
    """The one that staged first is fenced, and its error says what to do. The other one goes on."""
    first.start()
    first.wait_committed(3)
    first.arm(COMMIT, "hold")
    first.wait_reached()
    second.arm(COMMIT, "hold")
    second.start()
    second.wait_reached()
    first.release()
    error = first.wait_failed()
    assert "another writer has taken the place of this one" in error
    assert "start the query again" in error
    second.release()
    second.wait_committed(second.committed() + 5)


def _one_begins_late(first: Job, second: Job) -> None:
    """A task of the second begins when its batch has long been written by the first. Its rows are dropped, and Spark
    ends the query when it finds its batch in the checkpoint."""
    second.arm(TASK, "hold")
    second.wait_reached()
    first.start()
    first.wait_committed(first.committed() + 5)
    second.release()
    assert "Multiple streaming jobs detected" in second.wait_failed()
