"""`smq disk copy` below the command line: a copy holds every row, or there is none."""

import random
from pathlib import Path
from typing import Any

import pytest

from smq.replication.ports import Put, Table
from smq.replication.storage import copying
from smq.replication.storage.copying import UNFINISHED, copy_directory, summary_of
from smq.replication.storage.directory import DirectoryInUse, DiskOpenError, make_directory
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.node_log import NodeLog
from smq.replication.storage.offline import OfflineDisk, OfflineFailed
from tests.unit.replication.storage.support import StoreHarness

MARK = Put(Table.META, b"mark", b"copied")
SIZES = (0, 1, 4_000, 60_000)


def silent(_: str) -> None: ...


def filled(path: Path) -> dict[Table, list[tuple[bytes, bytes]]]:
    """A directory that kill -9 has met. Returns its rows."""
    rng = random.Random(7)
    harness = StoreHarness(path)
    rows = {
        table: {rng.randbytes(rng.randint(1, 60)): rng.randbytes(rng.choice(SIZES)) for _ in range(60)}
        for table in Table
    }
    for table, made in rows.items():
        harness.disk.submit([Put(table, key, value) for key, value in made.items()])
    harness.reopen()
    late = dict.fromkeys(Table, (b"late", b"in the log alone"))
    harness.write(*[Put(table, key, value) for table, (key, value) in late.items()])
    harness.crash().close()
    return {table: sorted([*made.items(), late[table]]) for table, made in rows.items()}


def rows_of(path: Path) -> dict[Table, list[tuple[bytes, bytes]]]:
    with OfflineDisk(path) as opened:
        found = {table: opened.disk.scan(table, b"", b"\xff" * 512) for table in Table}
    found[Table.META] = [row for row in found[Table.META] if row[0] not in (*copying._OF_THE_DIRECTORY, MARK.key)]
    return found


def test_a_copy_has_every_row_and_so_has_its_copy(tmp_path: Path) -> None:
    rows = filled(tmp_path / "from")
    copied = copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    assert rows_of(tmp_path / "to") == rows_of(tmp_path / "from") == rows
    assert copied.rows == sum(map(len, rows.values()))
    assert copy_directory(tmp_path / "to", tmp_path / "back", silent, MARK) == copied
    assert rows_of(tmp_path / "back") == rows


def test_a_directory_in_use_is_not_copied(tmp_path: Path) -> None:
    running = StoreHarness(tmp_path / "node")
    with pytest.raises(DirectoryInUse):
        copy_directory(tmp_path / "node", tmp_path / "to", silent, MARK)
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
    running.close()


def test_a_copy_replaces_nothing(tmp_path: Path) -> None:
    for name in ("node", "to"):
        StoreHarness(tmp_path / name).close()
    with pytest.raises(DiskOpenError, match="not empty"):
        copy_directory(tmp_path / "node", tmp_path / "to", silent, MARK)


def test_an_interrupted_copy_has_no_name_and_begins_again(tmp_path: Path) -> None:
    rows = filled(tmp_path / "from")

    def interrupt(what: str) -> None:
        if Table.TIMES.value in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_directory(tmp_path / "from", tmp_path / "to", interrupt, MARK)
    assert not (tmp_path / "to").exists()
    unfinished = tmp_path / ("to" + UNFINISHED)
    assert summary_of(unfinished).rows > 0
    with OfflineDisk(unfinished), pytest.raises(DirectoryInUse):  # the other command still runs
        copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    assert rows_of(tmp_path / "to") == rows
    assert not unfinished.exists()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_second_copy_to_the_same_name_is_refused_between_two_openings_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the first one is read again, and after that: the second would take its name, or lend it its own rows."""
    rows = filled(tmp_path / "from")
    StoreHarness(tmp_path / "second").close()
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(DirectoryInUse, match=r"another copy is writing .*to\.copying"):
            copy_directory(tmp_path / "second", tmp_path / "to", silent, MARK)
        refused.append(moment)

    def read_again(directory: Path) -> copying.Copied:
        if moment == "before":
            second()
        found = summary_of(directory)
        if moment == "after":
            second()
        return found

    monkeypatch.setattr(copying, "summary_of", read_again)
    copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    assert refused == [moment]
    assert rows_of(tmp_path / "to") == rows
    with OfflineDisk(tmp_path / "second") as opened:
        assert opened.disk.get(MARK.table, MARK.key) is None, "its node starts as before"


def test_a_copy_that_ended_since_the_name_was_looked_at_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(tmp_path / "from")
    StoreHarness(tmp_path / "second").close()

    def make_late(path: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(copying, "make_directory", make_directory)
            copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
        make_directory(path)

    monkeypatch.setattr(copying, "make_directory", make_late)
    with pytest.raises(DiskOpenError, match="not empty"):
        copy_directory(tmp_path / "second", tmp_path / "to", silent, MARK)
    assert rows_of(tmp_path / "to") == rows
    with OfflineDisk(tmp_path / "second") as opened:
        assert opened.disk.get(MARK.table, MARK.key) is None


def test_a_copy_that_lacks_a_row_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "from")

    submit = NodeLogDisk.submit

    def lossy(disk: NodeLogDisk, ops: list[Any]) -> int:
        return submit(disk, ops[:-1])

    monkeypatch.setattr(NodeLogDisk, "submit", lossy)
    with pytest.raises(OfflineFailed, match="does not hold what was written"):
        copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_value_that_cannot_be_read_has_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_empty: bool
) -> None:
    """Its node would take the empty value in the copy for damage. A value that is empty is none."""
    harness = StoreHarness(tmp_path / "from")
    harness.write(Put(Table.BATCHES, b"a", b""), Put(Table.BATCHES, b"b", bytes(60_000)))
    harness.close()
    pread = NodeLog._pread

    def fails(log: NodeLog, file: int, at: int, length: int) -> bytes:
        return b"" if length >= 60_000 and not is_empty else pread(log, file, at, length)

    monkeypatch.setattr(NodeLog, "_pread", fails)
    if is_empty:
        assert copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK).size >= 60_000
        return
    with pytest.raises(OfflineFailed, match=r"1 of the values in .* cannot be read: table batches, key 62"):
        copy_directory(tmp_path / "from", tmp_path / "to", silent, MARK)
    assert not (tmp_path / "to").exists()
