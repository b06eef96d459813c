"""A disk down to its reserve: records are refused, everything else goes on, and records come again.

In the long test a real file system fills up: three nodes share one small tmpfs, so all fill up together, and no node
with space is left to hand leadership to. In the short one the reserve is larger than any disk.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.partition.intake import REFRESHES_PER_RESERVE
from smq.testing.cluster import Cluster
from smq.testing.node_process import Node, run_cli, wait_for

SIZE_MIB, GROWN_MIB = 700, 1_400
RESERVE_MIB = 256  # the default
VALUE = b"x" * (512 << 10)
BATCHES_MAX = 2 * SIZE_MIB  # the disk is full long before


def _why_not() -> str | None:
    missing = [tool for tool in ("mount", "umount") if shutil.which(tool) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed"
    return None if os.geteuid() == 0 else "only root may mount a tmpfs"


@contextmanager
def _tmpfs(root: Path, size: str) -> Iterator[Path]:
    why = _why_not()
    if why is not None:
        pytest.skip(why)
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "smq-test", str(root)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with _tmpfs(tmp_path / "small", f"{SIZE_MIB}m") as root:
        yield root


def _fill(cluster: Cluster, topic: str, value: bytes = VALUE) -> tuple[list[int], SmqError]:
    """Publishes until a batch is refused for lack of space: the offsets that were acknowledged, and what was said. Any
    other error is of a leadership that is handed over to a node which seems to have more room."""
    offsets = []
    for _ in range(BATCHES_MAX):
        leader = cluster.nodes[cluster.wait_leader(topic, 0)]
        try:
            offsets.append(leader.raw.publish_values(topic, 0, [value]).base_offset)
        except SmqError as error:
            if error.code is ErrorCode.STORAGE_FULL:
                return offsets, error
            if not error.code.is_retriable:
                raise
    raise AssertionError(f"{len(offsets)} batches and the disk is not full")


def _published(cluster: Cluster, topic: str) -> int | None:
    leader = cluster.nodes[cluster.wait_leader(topic, 0)]
    return leader.raw.publish_values(topic, 0, [b"again"]).base_offset + 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_file_system_refuses_records_and_nothing_else(small_disk: Path) -> None:
    cluster = Cluster(small_disk)
    try:
        node = next(iter(cluster.start().nodes.values())).raw
        node.create_topic("t", 1, replication_factor=3)
        offsets, refused = _fill(cluster, "t")
        assert "free space on that disk" in refused.message or "free space on its disk" in refused.message
        usage = shutil.disk_usage(small_disk)
        # What the log has reserved, and what the collection gives back, is room, too.
        assert (RESERVE_MIB << 18) < usage.free < (RESERVE_MIB + 64) << 20

        # Raft goes on, and readers do.
        node.create_topic("another", 4, replication_factor=3)
        node.commit("g", "t", 0, offsets[-1])
        assert node.committed("g", "t", 0) == offsets[-1]
        assert any("MiB must still go: delete topics or records" in warning for warning in node.status().warnings)
        leader = cluster.nodes[cluster.wait_leader("t", 0)].raw  # a follower may have been full before the last batch
        assert leader.read_all("t", 0, offsets[-1])[offsets[-1]] == VALUE

        subprocess.run(["mount", "-o", f"remount,size={GROWN_MIB}m", str(small_disk)], check=True)
        end = wait_for("writes resume by themselves", lambda: _published(cluster, "t"))
        assert end > offsets[-1]
        assert all(node.is_alive() for node in cluster.nodes.values())  # no commit has failed
        cluster.wait_converged("t", 1)
        cluster.wait_digests_equal()
        kept = cluster.nodes[2].raw.read_all("t", 0)
        assert sorted(kept) == list(range(end))
        assert all(kept[offset] == VALUE for offset in offsets)
    finally:
        cluster.stop()


def _missing_mib(error: SmqError) -> int:
    (found,) = re.findall(r": (\d+) MiB must still go: delete topics or records, or free space", error.message)
    return int(found)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_disk_takes_records_again_once_what_it_names_is_deleted(tmp_path: Path) -> None:
    """On 340 MB, which leave some 70 beside the reserve: fewer than 288 MiB are ever deleted. Batches of another size
    come after them, into the space of those."""
    with _tmpfs(tmp_path / "small", "340000000") as root:
        cluster = Cluster(root, size=1)
        try:
            node = cluster.start().nodes[1]
            node.raw.create_topic("t", 1, replication_factor=1)
            for size in (100_000, 1_000_000, 60_000, 100_000):
                offsets, refused = _fill(cluster, "t", bytes(size))
                missing = _missing_mib(refused)
                assert 0 < missing <= RESERVE_MIB // 8 + RESERVE_MIB // REFRESHES_PER_RESERVE + 2
                assert len(offsets) * size > (missing << 20) + 3 * size
                few = offsets[0] + (missing << 19) // size
                _trim(node, few)
                wait_for("the deletion is counted", partial(_is_missing_less, cluster, missing))
                _trim(node, few + (missing + 3 << 19) // size + 3)
                wait_for("records are taken again", lambda: _published(cluster, "t"))
                _trim(node, -1)
            assert node.is_alive()
        finally:
            cluster.stop()


def _trim(node: Node, offset: int) -> None:
    done = run_cli("topic", "trim", "t", "--offset", str(offset), "--yes", "--bootstrap", node.grpc)
    assert done.returncode == 0, done.stderr


def _is_missing_less(cluster: Cluster, missing: int) -> bool:
    """Or nothing is: whole files come back, which held more than batches."""
    try:
        cluster.nodes[1].raw.publish_values("t", 0, [b"x"])
    except SmqError as refused:
        return _missing_mib(refused) < missing
    return True


def test_the_command_line_names_a_disk_below_its_reserve_while_it_waits_and_fails(tmp_path: Path) -> None:
    """`smq produce` said nothing for a minute, and `smq status` was content."""
    cluster = Cluster(tmp_path, size=1)
    try:
        cluster.start(disk_reserve_bytes=1 << 50)
        topic, where = cluster.make_topic(), ("--bootstrap", cluster.nodes[1].grpc)
        sent = run_cli("produce", topic, "--delivery-timeout", "3s", *where, input="x\n")
        status = run_cli("status", *where)
    finally:
        cluster.stop()
    first, *_, last = sent.stderr.splitlines()
    assert re.match(rf"waiting for the next attempt at {topic}/0 \(STORAGE_FULL: node 1 has \d+ MiB left", first)
    assert sent.returncode == 1
    assert last.startswith(f"smq: STORAGE_FULL: no acknowledgement in 3000 ms of 1 record for {topic}/0")
    assert (status.returncode, "node 1 has" in status.stdout) == (1, True)
