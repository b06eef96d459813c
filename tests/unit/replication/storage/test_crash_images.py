"""Power losses in the middle of real LMDB commits: whichever unsynced sectors survive, the store opens and holds every
acknowledged batch and entry. With LMDB's syncs off it does not."""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from chaos_tests.crash.recorder import record
from chaos_tests.crash.trace import Acked, Sync, Trace, Write, dump, images, load, parse
from chaos_tests.sim.long_runs import SUBMISSIONS, image_failures

RECORDED = Path(__file__).parent / "crash_trace.txt"  # python -m chaos_tests.crash.recorder FILE 60
QUICK_IMAGES = 100
FULL_IMAGES = 10_000


def failures(trace: Trace, folder: Path, count: int, *, enough: int = 1 << 30) -> list[str]:
    return list(islice(image_failures(trace, folder, count), enough))


def test_every_image_of_a_recorded_trace_holds_every_acknowledged_record(tmp_path: Path) -> None:
    assert failures(load(RECORDED), tmp_path, QUICK_IMAGES) == []


def test_a_store_that_does_not_wait_for_its_disk_is_detected(tmp_path: Path) -> None:
    assert failures(load(RECORDED).without_syncs(), tmp_path, QUICK_IMAGES, enough=1) != []


def test_the_recorded_trace_is_rich_enough() -> None:
    events = load(RECORDED).events
    assert sum(isinstance(e, Acked) for e in events) == 60
    assert sum(isinstance(e, Sync) for e in events) >= 60
    assert sum(isinstance(e, Write) and e.is_synced for e in events) >= 60
    assert max(e.log_start for e in events if isinstance(e, Acked)) > 0, "pages were freed and used again"


def test_unsynced_writes_may_be_missing_and_synced_ones_never_are() -> None:
    trace = parse(["d 0 AAAA", "d 1 AQEB", "w 0 0", "s", "W 3 0", "a 0 0 0", "w 0 1", "a 0 1 1", "a 0 1 1"])
    seen = {image.data for image in images(trace, 1, 200)}
    assert seen == {bytes(6), b"\x01\x01\x01" + bytes(3)}


def test_a_trace_round_trips(tmp_path: Path) -> None:
    trace = load(RECORDED)
    (tmp_path / "again").write_bytes(dump(trace))
    assert load(tmp_path / "again").events == trace.events


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ten_thousand_images_of_a_fresh_trace_hold_every_acknowledged_record(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nothing can record the writes")
    assert failures(record(SUBMISSIONS), tmp_path, FULL_IMAGES) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("option", ["metasync=False", "sync=False"])
def test_lmdb_without_its_syncs_loses_acknowledged_records(tmp_path: Path, option: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nothing can record the writes")
    assert failures(record(60, (option,)), tmp_path, 1_500, enough=1) != []
