"""What each store makes of a directory, and the directories that each refuses to open."""

import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from smq.replication.ports import Put, Table
from smq.replication.storage.database_sqlite import JOURNAL_FILE, SHARED_FILE
from smq.replication.storage.directory import LOCK_FILE, DirectoryInUse, DiskOpenError, FormatUnsupported
from smq.replication.storage.disk import StoreDisk
from smq.replication.storage.engine import Engine
from smq.replication.storage.format_version import FORMAT_KEY, FORMAT_VERSION
from smq.replication.storage.opening import open_disk
from smq.replication.storage.write_ahead import WRITE_AHEAD_FILE
from tests.unit.replication.storage.support import HARNESSES, LmdbHarness, SqliteHarness

PAGE_BYTES = 4096
OF_THE_STORE = {Engine.LMDB: ["lock.mdb"], Engine.SQLITE: [JOURNAL_FILE, SHARED_FILE]}


@pytest.fixture(params=list(Engine))
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


def opened(path: Path, engine: Engine) -> StoreDisk:
    return open_disk(path, engine, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None)


def harness_of(path: Path, engine: Engine) -> LmdbHarness | SqliteHarness:
    made: LmdbHarness | SqliteHarness = HARNESSES[engine](path)
    return made


def test_only_the_owner_can_access_the_directory_and_its_files(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "a" / "node-1"
    old_umask = os.umask(0)
    try:
        disk = opened(path, engine)
    finally:
        os.umask(old_umask)
    found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    disk.close()
    assert found == dict.fromkeys([engine.data_file, *OF_THE_STORE[engine], LOCK_FILE, WRITE_AHEAD_FILE], 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_permissions_of_an_open_directory_are_tightened(tmp_path: Path, engine: Engine) -> None:
    tmp_path.chmod(0o755)
    opened(tmp_path, engine).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


SECOND = """
import sys
from smq.replication.storage.directory import DirectoryInUse
from smq.replication.storage.engine import Engine
from smq.replication.storage.opening import open_disk
try:
    open_disk(sys.argv[1], Engine(sys.argv[2]), call_soon_threadsafe=print, on_fatal=print)
except DirectoryInUse as e:
    print(e)
"""


def test_a_second_process_is_refused_with_the_first_ones_id(tmp_path: Path, engine: Engine) -> None:
    disk = opened(tmp_path, engine)
    command = [sys.executable, "-c", SECOND, str(tmp_path), engine]
    second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"in use by process {os.getpid()}" in second.stdout
    with pytest.raises(DirectoryInUse, match=f"in use by process {os.getpid()}"):
        opened(tmp_path, engine)
    disk.close()
    opened(tmp_path, engine).close()


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DiskOpenError, match="choose a directory"):
        opened(tmp_path / "file" / "node", engine)


def test_the_format_version_is_written_at_creation(tmp_path: Path, engine: Engine) -> None:
    disk = opened(tmp_path, engine)
    assert disk.get(Table.META, FORMAT_KEY) == FORMAT_VERSION.to_bytes(4, "big")
    disk.close()


def test_another_format_version_is_refused_and_left_alone(tmp_path: Path, engine: Engine) -> None:
    harness = harness_of(tmp_path / "node", engine)
    harness.write(Put(Table.META, FORMAT_KEY, (99).to_bytes(4, "big")))
    harness.close()
    for _ in range(2):
        with pytest.raises(FormatUnsupported, match=r"on-disk format 99, .*the version that wrote it.*empty one"):
            opened(tmp_path / "node", engine)


def their_environment(path: Path) -> None:
    with lmdb.open(str(path), max_dbs=2, lib_version=0) as env:
        env.open_db(b"theirs")


def their_database(path: Path) -> None:
    with sqlite3.connect(path / Engine.SQLITE.data_file) as theirs:
        theirs.execute("CREATE TABLE theirs (x)")
    theirs.close()


@pytest.mark.parametrize(("engine", "make"), [(Engine.LMDB, their_environment), (Engine.SQLITE, their_database)])
def test_a_store_that_is_not_smqs_is_refused_and_left_alone(
    tmp_path: Path, engine: Engine, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    before = (tmp_path / engine.data_file).read_bytes()
    with pytest.raises(FormatUnsupported, match="not smq's"):
        opened(tmp_path, engine)
    assert (tmp_path / engine.data_file).read_bytes() == before


def test_a_file_that_is_no_store_is_refused(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / engine.data_file).write_bytes(b"something else entirely" * 1000)
    for _ in range(2):  # and the lock was given back
        with pytest.raises(FormatUnsupported, match=engine.data_file):
            opened(tmp_path, engine)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_cut_data_file_is_refused_by_name_and_left_as_it_is(tmp_path: Path, engine: Engine, kept: float) -> None:
    harness = harness_of(tmp_path, engine)
    for number in range(200):
        harness.write(Put(Table.RAFT_LOG, b"%08d" % number, b"x" * 500))
    harness.close()
    file = tmp_path / engine.data_file
    size = int(file.stat().st_size * kept) // PAGE_BYTES * PAGE_BYTES
    os.truncate(file, size)
    with pytest.raises(DiskOpenError, match=re.escape(str(file))):
        opened(tmp_path, engine)
    assert file.stat().st_size == size
