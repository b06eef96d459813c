"""The data directory: its name is durable, and one of another user is refused with a message that says whose it is."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.replication.storage.directory import DiskOpenError, is_used, lock_directory, make_directory, sync_directory
from smq.replication.storage.disk import NodeLogDisk

SOMEBODY_ELSE = 65534  # the customary user without files


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory of root's that this process may read and not write. Root itself may write everywhere, so a test that
    runs as root becomes another user; any other user finds one in the root of the file system."""
    if os.geteuid() != 0:
        yield Path("/")
        return
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="volume"))
    made.chmod(0o755)
    (made / "smq.lock").touch(mode=0o600)
    os.seteuid(SOMEBODY_ELSE)
    try:
        yield made
    finally:
        os.seteuid(0)
        shutil.rmtree(made)


def advice(volume: Path) -> str:
    return (
        f"{volume} belongs to user 0, and this process is user {os.geteuid()}: give it to that user (chown), or name a "
        "directory in it that this user may make (data_dir)"
    )


def test_a_directory_in_a_volume_of_root_is_refused_with_its_owner_and_what_to_do(volume: Path) -> None:
    path = volume / "smq-data-of-a-test" / "node"
    with pytest.raises(DiskOpenError) as refused:
        make_directory(path)
    assert str(refused.value) == f"data directory {path} cannot be used: Permission denied. {advice(volume)}"
    assert not path.parent.exists()


def test_a_volume_of_root_itself_is_refused_and_keeps_its_mode(volume: Path) -> None:
    before = stat.S_IMODE(volume.stat().st_mode)
    with pytest.raises(DiskOpenError) as refused:
        make_directory(volume)
    assert str(refused.value) == f"data directory {volume} cannot be used: Operation not permitted. {advice(volume)}"
    assert stat.S_IMODE(volume.stat().st_mode) == before


def test_a_lock_file_in_a_volume_of_root_is_refused_with_the_owner_of_what_is_in_the_way(volume: Path) -> None:
    with pytest.raises(DiskOpenError, match=r"smq\.lock cannot be opened: Permission denied\. .* belongs to user 0, "):
        lock_directory(volume)


def test_no_disk_opens_in_a_volume_of_root(volume: Path) -> None:
    def unused(*_: object) -> None:
        raise AssertionError("nothing has been opened")

    path = volume / "smq-data-of-a-test"
    assert not is_used(path)
    with pytest.raises(DiskOpenError, match="belongs to user 0, and this process is user"):
        NodeLogDisk(path, call_soon_threadsafe=unused, on_fatal=unused, call_soon=unused)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Which directories were made and synced, in order."""
    found: list[tuple[str, Path]] = []
    real_mkdir, real_fsync = os.mkdir, os.fsync

    def mkdir(path: Path, mode: int) -> None:
        real_mkdir(path, mode)
        found.append(("made", Path(path)))

    def fsync(fd: int) -> None:
        real_fsync(fd)
        found.append(("synced", Path(os.readlink(f"/proc/self/fd/{fd}"))))

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_each_name_is_durable_before_anything_is_made_below_it(tmp_path: Path, events: list[tuple[str, Path]]) -> None:
    above = tmp_path / "above"
    make_directory(above / "node")
    assert events == [
        ("synced", tmp_path.parent),
        ("made", above),
        ("synced", tmp_path),
        ("made", above / "node"),
        ("synced", above),
    ]
    assert stat.S_IMODE((above / "node").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["above", "above/node"])
def test_a_name_that_a_crash_has_left_unsynced_is_synced_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, Path]], name: str
) -> None:
    made, path = tmp_path / name, tmp_path / "above" / "node"

    def crash(directory: Path) -> None:
        if events and events[-1] == ("made", made):
            raise KeyboardInterrupt
        sync_directory(directory)

    with monkeypatch.context() as patch:
        patch.setattr("smq.replication.storage.directory.sync_directory", crash)
        with pytest.raises(KeyboardInterrupt):
            make_directory(path)
    assert made.exists()
    assert ("synced", made.parent) not in events
    make_directory(path)
    assert ("synced", made.parent) in events
    assert path.exists()


def test_a_parent_that_may_not_be_read_refuses_no_directory_that_is_there(volume: Path) -> None:
    if os.geteuid() != SOMEBODY_ELSE:
        pytest.skip("only root can make a directory for another user")
    os.seteuid(0)
    (volume / "node").mkdir(mode=0o700)
    os.chown(volume / "node", SOMEBODY_ELSE, -1)
    volume.chmod(0o711)
    os.seteuid(SOMEBODY_ELSE)
    make_directory(volume / "node")
    os.seteuid(0)
    volume.chmod(0o733)
    os.seteuid(SOMEBODY_ELSE)
    with pytest.raises(DiskOpenError, match="Permission denied"):
        make_directory(volume / "new")
