"""`smq disk copy` below the command line: a copy holds every row, or there is none."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from smq.replication.ports import Put, Table
from smq.replication.storage import copying
from smq.replication.storage.copying import UNFINISHED, copy_directory, summary_of
from smq.replication.storage.database_sqlite import INLINE_BYTES_MAX
from smq.replication.storage.directory import DirectoryInUse, DiskOpenError
from smq.replication.storage.disk import StoreDisk
from smq.replication.storage.disk_sqlite import SqliteDisk
from smq.replication.storage.engine import Engine, WrongEngine, engine_of
from smq.replication.storage.offline import OfflineDisk, OfflineFailed
from tests.unit.replication.storage.support import HARNESSES

OTHER = {Engine.LMDB: Engine.SQLITE, Engine.SQLITE: Engine.LMDB}
SIZES = (0, 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 60_000)


def silent(_: str) -> None: ...


def filled(path: Path, engine: Engine) -> dict[Table, list[tuple[bytes, bytes]]]:
    """A directory as kill -9 leaves it: some rows are in the write-ahead file alone. Returns its rows."""
    rng = random.Random(7)
    harness = HARNESSES[engine](path.with_name("running"))
    rows = {
        table: {rng.randbytes(rng.randint(1, 60)): rng.randbytes(rng.choice(SIZES)) for _ in range(60)}
        for table in Table
    }
    for table, made in rows.items():
        harness.disk.submit([Put(table, key, value) for key, value in made.items()])
    harness.settle_in_store()
    late = dict.fromkeys(Table, (b"late", b"in the write-ahead file"))
    harness.disk.submit([Put(table, key, value) for table, (key, value) in late.items()])
    harness.settle()
    shutil.copytree(harness.path, path)
    harness.close()
    return {table: sorted([*made.items(), late[table]]) for table, made in rows.items()}


def rows_of(path: Path, engine: Engine) -> dict[Table, list[tuple[bytes, bytes]]]:
    with OfflineDisk(path, engine) as opened:
        found = {table: opened.disk.scan(table, b"", b"\xff" * 512) for table in Table}
    found[Table.META] = [row for row in found[Table.META] if row[0] not in copying._OF_THE_DIRECTORY]
    return found


@pytest.mark.parametrize("engine", list(Engine))
def test_a_copy_has_every_row_and_so_has_its_copy(tmp_path: Path, engine: Engine) -> None:
    rows = filled(tmp_path / "from", engine)
    copied = copy_directory(tmp_path / "from", tmp_path / "to", engine, OTHER[engine], silent)
    assert engine_of(tmp_path / "to") is OTHER[engine]
    assert rows_of(tmp_path / "to", OTHER[engine]) == rows_of(tmp_path / "from", engine) == rows
    assert copied.rows == sum(map(len, rows.values()))
    assert copy_directory(tmp_path / "to", tmp_path / "back", OTHER[engine], engine, silent) == copied
    assert rows_of(tmp_path / "back", engine) == rows


@pytest.mark.parametrize("engine", list(Engine))
def test_a_directory_of_another_engine_is_refused_with_the_way_out(tmp_path: Path, engine: Engine) -> None:
    HARNESSES[engine](tmp_path / "node").close()
    with pytest.raises(WrongEngine, match=rf'storage_engine = "{engine}".*smq disk copy .* --engine {OTHER[engine]}'):
        HARNESSES[OTHER[engine]](tmp_path / "node")
    assert not (tmp_path / "node" / OTHER[engine].data_file).exists()
    HARNESSES[engine](tmp_path / "node").close()


def test_a_directory_in_use_is_not_copied(tmp_path: Path) -> None:
    running = HARNESSES[Engine.LMDB](tmp_path / "node")
    with pytest.raises(DirectoryInUse):
        copy_directory(tmp_path / "node", tmp_path / "to", Engine.LMDB, Engine.SQLITE, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
    running.close()


def test_a_copy_replaces_nothing(tmp_path: Path) -> None:
    for name in ("node", "to"):
        HARNESSES[Engine.LMDB](tmp_path / name).close()
    with pytest.raises(DiskOpenError, match="not empty"):
        copy_directory(tmp_path / "node", tmp_path / "to", Engine.LMDB, Engine.SQLITE, silent)
    assert engine_of(tmp_path / "to") is Engine.LMDB


def test_an_interrupted_copy_has_no_name_and_begins_again(tmp_path: Path) -> None:
    rows = filled(tmp_path / "from", Engine.LMDB)

    def interrupt(what: str) -> None:
        if Table.TIMES.value in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_directory(tmp_path / "from", tmp_path / "to", Engine.LMDB, Engine.SQLITE, interrupt)
    assert not (tmp_path / "to").exists()
    unfinished = tmp_path / ("to" + UNFINISHED)
    assert summary_of(unfinished, Engine.SQLITE).rows > 0
    with OfflineDisk(unfinished, Engine.SQLITE), pytest.raises(DirectoryInUse):  # the other command still runs
        copy_directory(tmp_path / "from", tmp_path / "to", Engine.LMDB, Engine.SQLITE, silent)
    copy_directory(tmp_path / "from", tmp_path / "to", Engine.LMDB, Engine.SQLITE, silent)
    assert rows_of(tmp_path / "to", Engine.SQLITE) == rows
    assert not unfinished.exists()


def test_a_copy_that_lacks_a_row_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "from", Engine.LMDB)

    def lossy(disk: SqliteDisk, ops: list[Any]) -> int:
        return StoreDisk.submit(disk, ops[:-1])

    monkeypatch.setattr(SqliteDisk, "submit", lossy)
    with pytest.raises(OfflineFailed, match="does not hold what was written"):
        copy_directory(tmp_path / "from", tmp_path / "to", Engine.LMDB, Engine.SQLITE, silent)
    assert not (tmp_path / "to").exists()
