"""`smq disk`: what an operator does with a directory that was restored from a copy, or is to have another store."""

import re
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from smq.coordinator.cli.root import cli
from smq.raft_state.ids import NodeId
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import DISK_KEY, StartRefused, claim_identity, replacement
from smq.replication.ports import Table
from smq.replication.raft.journal import JournalWriter, RaftJournal
from smq.replication.raft.messages import NO_OP
from smq.replication.storage.directory import FormatUnsupported
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.offline import OfflineDisk, OfflineFailed

CONFIG = NodeConfig(node_id=NodeId(1), cluster_id="c", peers={})


def fail(error: BaseException) -> None:
    raise error


def fail_to_call(_: Callable[[], None]) -> None:
    raise AssertionError("nothing was opened")


def opened(directory: Path) -> NodeLogDisk:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    return NodeLogDisk(directory, call_soon_threadsafe=calls.put, on_fatal=fail)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a node that has run, and has heard of others' disks."""
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    disk = NodeLogDisk(tmp_path / "data", call_soon_threadsafe=calls.put, on_fatal=fail)
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


@pytest.mark.parametrize("command", [["renew"], ["forget", "--yes"], ["export", "--output", "no such directory"]])
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


def test_a_directory_of_an_earlier_format_is_refused_by_all_commands_and_starts(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("data.mdb", "data.wal"):
        (old / name).touch()
    for command in (["renew", old], ["forget", "--yes", old], ["copy", old, tmp_path / "to"]):
        result = smq(*command)
        assert (result.exit_code, "data.wal, of an earlier on-disk format" in result.output) == (1, True)
        assert "Traceback" not in result.output
    with pytest.raises(FormatUnsupported, match="move the directory away"):
        NodeLogDisk(old, call_soon_threadsafe=fail_to_call, on_fatal=fail)


def test_a_copy_is_a_nodes_directory(directory: Path, tmp_path: Path) -> None:
    disk = opened(directory)
    before = disk.get(Table.META, DISK_KEY)
    disk.close()
    result = smq("copy", directory, tmp_path / "to")
    assert result.exit_code == 0, result.output
    assert f'data_dir = "{tmp_path / "to"}"' in result.output
    disk = opened(tmp_path / "to")
    assert disk.get(Table.META, DISK_KEY) == before
    claim_identity(disk, CONFIG, Random(2), 2, lambda: None)  # a node starts on it
    disk.close()


def test_no_node_starts_on_what_was_copied_until_it_is_another_disk(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the copy was interrupted before it got its name; the copy can be repeated then."""

    rename = Path.rename

    def interrupt(path: Path, to: Path) -> Path:
        if to == tmp_path / "to":
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupt)
        assert smq("copy", directory, tmp_path / "to").exit_code == 130
    for _ in range(2):
        disk = opened(directory)
        with pytest.raises(StartRefused, match=rf"copied to {re.escape(str(tmp_path / 'to'))}.*smq disk renew"):
            claim_identity(disk, CONFIG, Random(2), 2, lambda: None)
        disk.close()
        if not (tmp_path / "to").exists():
            assert smq("copy", directory, tmp_path / "to").exit_code == 0
    copy = opened(tmp_path / "to")
    claim_identity(copy, CONFIG, Random(2), 2, lambda: None)
    before = copy.get(Table.META, DISK_KEY)
    copy.close()
    assert smq("renew", directory).exit_code == 0
    disk = opened(directory)
    claim_identity(disk, CONFIG, Random(2), 2, lambda: None)
    assert disk.get(Table.META, DISK_KEY) != before
    disk.close()


def test_a_copy_whose_original_cannot_be_closed_has_no_name(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that "nothing was copied" is true, and the command can be repeated."""
    exit_block = OfflineDisk.__exit__

    def fail_to_close(disk: OfflineDisk, *error: Any) -> None:
        exit_block(disk, *error)
        if disk.directory == directory:
            raise OfflineFailed("the last commit failed")

    with monkeypatch.context() as patch:
        patch.setattr(OfflineDisk, "__exit__", fail_to_close)
        result = smq("copy", directory, tmp_path / "to")
    assert result.exit_code == 1
    assert "nothing was copied" in result.output
    assert not (tmp_path / "to").exists()
    assert smq("copy", directory, tmp_path / "to").exit_code == 0


def test_a_copy_of_a_directory_in_use_or_to_one_is_refused_in_a_sentence(directory: Path, tmp_path: Path) -> None:
    running = opened(directory)
    result = smq("copy", directory, tmp_path / "to")
    assert (result.exit_code, "is in use" in result.output, "Traceback" in result.output) == (1, True, False)
    running.close()
    result = smq("copy", directory, directory)
    assert (result.exit_code, "is not empty" in result.output) == (1, True)
