"""examples/frame_store.py: the conformance suite over a store that smq does not have, as docs/extending.md says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from examples.frame_store import FrameStore
from smq.replication.ports import Put, Table
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.engine import WrongEngine
from tests.pages import claimed
from tests.unit.replication.storage import test_disk_conformance as suite
from tests.unit.replication.storage.support import LmdbHarness, StoreHarness

# Pytest finds the suite's tests here, too, with this module's `harness`.
globals().update({name: test for name, test in vars(suite).items() if name.startswith("test_")})


class FrameHarness(StoreHarness[FrameStore]):
    def _opened(self) -> FrameStore:
        return FrameStore(
            self.path,
            call_soon_threadsafe=self._calls.put,
            on_fatal=self.fatal.append,
            write_ahead_bytes=self.write_ahead_bytes,
        )


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrameHarness]:
    made = FrameHarness(tmp_path / "node")
    yield made
    made.close()


class FramesAgainstDict(suite.StoreAgainstDict):
    open_store = FrameHarness


TestFramesAgainstDict = FramesAgainstDict.TestCase
TestFramesAgainstDict.settings = settings(suite.STORE_SETTINGS, max_examples=8)


def test_the_block_of_the_page_takes_the_suite_over() -> None:
    [block] = claimed("docs/extending.md", __file__)
    names: dict[str, object] = {}
    exec(compile(block, "docs/extending.md", "exec"), names)
    taken = {name for name in names if name.startswith("test_")}
    assert len(taken) >= 19
    assert taken <= set(globals())


def test_a_torn_frame_is_cut_and_a_rotted_one_is_refused(harness: FrameHarness) -> None:
    for i in range(3):
        harness.disk.submit([Put(Table.BATCHES, b"%d" % i, b"value" * 20_000)])  # too large for the write-ahead file
        harness.settle()
    harness.close()
    file = harness.path / "data.frames"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0\0\1\0torn")
    assert harness.reopen().scan_keys(Table.BATCHES, b"", b"\xff") == [b"0", b"1", b"2"]
    harness.close()
    rotted = bytearray(file.read_bytes())
    rotted[len(rotted) // 4] ^= 1
    file.write_bytes(rotted)
    with pytest.raises(DiskOpenError, match="damaged"):
        harness.reopen()


def test_a_directory_of_another_store_is_refused(tmp_path: Path) -> None:
    other: StoreHarness[LmdbDisk] = LmdbHarness(tmp_path / "node")
    other.close()
    with pytest.raises(WrongEngine, match="made by storage engine lmdb, not by frames"):
        FrameHarness(tmp_path / "node")
