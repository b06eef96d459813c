"""`smq disk`: what an operator does with a directory that was restored from a copy."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import Random

import pytest
from click.testing import CliRunner, Result

from smq.coordinator.cli.root import cli
from smq.raft_state.ids import NodeId
from smq.replication.config import NodeConfig
from smq.replication.membership.identity import DISK_KEY, claim_identity, replacement
from smq.replication.ports import Table
from smq.replication.raft.journal import RaftJournal
from smq.replication.raft.messages import NO_OP
from smq.replication.raft.writer import JournalWriter
from smq.replication.storage.disk_lmdb import LmdbDisk

CONFIG = NodeConfig(node_id=NodeId(1), cluster_id="c", peers={})


def fail(error: BaseException) -> None:
    raise error


def opened(directory: Path) -> LmdbDisk:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    return LmdbDisk(directory, call_soon_threadsafe=calls.put, on_fatal=fail, map_size=1 << 30)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a node that has run, and has heard of others' disks."""
    disk = opened(tmp_path / "data")
    claim_identity(disk, CONFIG, Random(1), 1, lambda: None)
    journal = RaftJournal()
    journal.add(bytes([NO_OP]), 1, 0)
    journal.keep_marks(b"heard of others")
    JournalWriter(disk, journal, lambda: None).flush()
    disk.close()
    return tmp_path / "data"


def smq(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["disk", *map(str, arguments)])


def test_a_renewed_directory_is_another_disk_and_says_why(directory: Path) -> None:
    disk = opened(directory)
    before = disk.get(Table.META, DISK_KEY)
    disk.close()
    result = smq("renew", directory)
    assert result.exit_code == 0, result.output
    disk = opened(directory)
    assert disk.get(Table.META, DISK_KEY) not in (None, before)
    assert "old copy" in replacement(disk)
    disk.close()


def test_a_directory_forgets_what_it_had_heard_and_nothing_else(directory: Path) -> None:
    result = smq("forget", "--yes", directory)
    assert result.exit_code == 0, result.output
    disk = opened(directory)
    journal = RaftJournal()
    for _ in journal.load(disk):
        pass
    assert (journal.marks, journal.base_writes, len(journal)) == (b"", 1, 1)
    disk.close()


def test_forgetting_asks_first(directory: Path) -> None:
    result = CliRunner().invoke(cli, ["disk", "forget", str(directory)], input="n\n")
    assert result.exit_code == 1
    assert "ALL nodes" in result.output


@pytest.mark.parametrize("command", [["renew"], ["forget", "--yes"]])
def test_a_directory_of_no_node_or_in_use_is_refused_in_a_sentence(
    command: list[str], directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    result = smq(*command, tmp_path / "empty")
    assert result.exit_code == 1
    assert "holds no data.mdb" in result.output
    assert list((tmp_path / "empty").iterdir()) == []
    opened(tmp_path / "fresh").close()
    result = smq(*command, tmp_path / "fresh")
    assert (result.exit_code, "no node has run on it" in result.output) == (1, True)
    running = opened(directory)
    result = smq(*command, directory)
    assert (result.exit_code, "is in use" in result.output) == (1, True)
    running.close()
