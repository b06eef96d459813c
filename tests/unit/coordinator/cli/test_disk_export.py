"""`smq disk export` when something is in the way. The disk of a cluster: tests/cluster/faults/test_lone_disk.py."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from smq.clients import ConsumerRecord
from smq.coordinator.cli.export_files import JsonlFile
from smq.coordinator.cli.root import cli
from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId, TsNs
from smq.records import NewRecord, encode_batch, parse_header
from smq.replication.log.store import LogStore
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import claim_identity
from smq.replication.ports import Disk
from smq.replication.storage.offline import OfflineDisk
from tests.unit.replication.storage.support import make_batch
from tests.unit.replication.test_salvage import commands, pid_of, write_journal

OTHER = PartitionId(b"\xff" * 20)  # of a topic that the state does not have


def write_log(disk: Disk, pid: PartitionId, *batches: bytes) -> None:
    log = LogStore(disk).create(pid, Offset(0))
    for data in batches:
        ts_ns = TsNs(log.last_ts_ns + 1)
        log.append(data, parse_header(data), epoch=Epoch(0), ts_ns=ts_ns, done=lambda: None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of partition 0 two batches are committed; of partition 1 none is known to be, and of OTHER nothing is known."""
    records = [encode_batch([NewRecord(b"k", b"%d" % n, 1)]) for n in range(2)]
    with OfflineDisk(tmp_path / "data") as opened:
        claim_identity(opened.disk, NodeConfig(node_id=NodeId(1), cluster_id="c", peers={}), Random(1), 1, lambda: None)
        write_journal(opened.disk, entries := commands(partitions=2, hwm=2), committed=len(entries))
        for pid in (pid_of(0), pid_of(1), OTHER):
            write_log(opened.disk, pid, *records)
    return tmp_path / "data"


def export(directory: Path, *options: object) -> Result:
    arguments = ["disk", "export", directory, "--output", directory.parent / "out", *options]
    return CliRunner().invoke(cli, [*map(str, arguments)])


def values(directory: Path) -> dict[str, list[str]]:
    """By file of records."""
    root = directory.parent / "out" / "records"
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            lines = path.read_text().splitlines()
            found[str(path.relative_to(root))] = [json.loads(line)["value"] for line in lines]
    return found


def test_what_is_not_known_to_be_committed_has_files_of_its_own(directory: Path) -> None:
    done = export(directory)
    assert done.exit_code == 0, done.output
    both, other = ["0", "1"], f"{OTHER[:16].hex()}/{0xFFFFFFFF}.uncertain.jsonl"
    assert values(directory) == {"t/0.jsonl": both, "t/1.uncertain.jsonl": both, other: both}
    assert "2 records, and 4 that may have been committed" in done.output
    assert (directory.parent / "out").stat().st_mode & 0o077 == 0
    assert export(directory).exit_code == 1, "the directory is not empty"


def test_a_batch_that_does_not_decode_is_missing_and_the_rest_is_not(directory: Path) -> None:
    with OfflineDisk(directory) as opened:
        write_log(opened.disk, pid_of(0), encode_batch([NewRecord(b"k", b"0", 1)]), make_batch())
    done = export(directory, "--json", "--topic", "t")
    assert done.exit_code == 1
    first, _ = json.loads(done.output)["partitions"]
    assert [(gap["lo"], gap["hi"]) for gap in first["missing"]] == [(1, 2)]
    assert values(directory) == {"t/0.jsonl": ["0"], "t/1.uncertain.jsonl": ["0", "1"]}


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "t/1.uncertain.jsonl cannot be written: No space left"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["full disk", "Ctrl-C"],
)
def test_an_export_that_ends_early_says_what_is_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, text: str
) -> None:
    write: Callable[[JsonlFile, Sequence[ConsumerRecord]], None] = JsonlFile.write

    def fail(file: JsonlFile, records: Sequence[ConsumerRecord]) -> None:
        if records[0].partition == 1:
            raise error
        write(file, records)

    monkeypatch.setattr(JsonlFile, "write", fail)
    done = export(directory, "--topic", "t")
    assert (done.exit_code, text in done.stderr) == (exit_code, True), done.output
    assert "has the records of 1 of 2 partitions" in done.stderr
    assert values(directory) == {"t/0.jsonl": ["0", "1"]}
    assert not (directory.parent / "out" / "report.json").exists()
