"""Power losses in the middle of real commits: whichever unsynced sectors and names of the files survive, the disk opens
and holds every acknowledged batch and entry. It does not with the bugs planted here, one for each rule of the log."""

import os
import re
import signal
import struct
from collections.abc import Callable
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest

from chaos_tests.crash.compacting import course, verdict
from chaos_tests.crash.planted import IMAGE_BUGS, REPLAY_BUGS
from chaos_tests.crash.recorder import Reader, RecordingError, record, record_compaction
from chaos_tests.crash.trace import Acked, Named, Sync, Trace, Truncate, Write, dump, images, load, parse
from chaos_tests.crash.verify import log_and_journal
from chaos_tests.sim.long_runs import SUBMISSIONS, image_failures
from smq.records import parse_header
from smq.replication.ports import Disk
from smq.replication.storage.frames import PAGE_BYTES
from smq.replication.storage.index import DATA_FILE
from tests.skips import needs

RECORDED = Path(__file__).parent / "crash_trace.txt"  # python -m chaos_tests.crash.recorder FILE 60
OF_COMPACTION = Path(__file__).parent / "crash_trace_of_compaction.txt"  # ... FILE compacting
LOG = ".new"  # files of the log begin with that name
Judge = Callable[[Disk, Acked], str]
QUICK_IMAGES = 100
FOUND = 3  # the code that a process ends with
FULL_IMAGES, IMAGES_OF_COMPACTION = 10_000, 2_000


def failures(
    recorded: Path | Trace, folder: Path, count: int, *, enough: int = 1 << 30, judge: Judge = log_and_journal
) -> list[str]:
    trace = load(recorded) if isinstance(recorded, Path) else recorded
    return list(islice(image_failures(trace, folder, count, judge=judge), enough))


@pytest.mark.parametrize(("recorded", "judge"), [(RECORDED, log_and_journal), (OF_COMPACTION, verdict)])
def test_every_image_of_a_recorded_trace_holds_every_acknowledged_record(
    tmp_path: Path, recorded: Path, judge: Judge
) -> None:
    """And the old segments or the new ones, as their rows say."""
    assert failures(recorded, tmp_path, QUICK_IMAGES, judge=judge) == []


@pytest.mark.parametrize(("recorded", "judge"), [(RECORDED, log_and_journal), (OF_COMPACTION, verdict)])
def test_a_log_that_does_not_wait_for_its_medium_is_detected(tmp_path: Path, recorded: Path, judge: Judge) -> None:
    assert failures(load(recorded).without_syncs(LOG), tmp_path, 3 * QUICK_IMAGES, enough=1, judge=judge) != []


def test_an_index_that_does_not_wait_for_its_medium_is_detected(tmp_path: Path) -> None:
    """In a process of its own: LMDB may end it."""
    child = get_context("spawn").Process(target=_end_if_found, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode in (FOUND, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)


def _end_if_found(folder: Path) -> None:
    if failures(load(RECORDED).without_syncs(DATA_FILE), folder, 3 * QUICK_IMAGES, enough=1):
        os._exit(FOUND)


@pytest.mark.parametrize("bug", REPLAY_BUGS)
def test_a_bug_of_the_replay_is_found(tmp_path: Path, bug: str) -> None:
    try:
        with REPLAY_BUGS[bug].planted():
            found = failures(load(RECORDED), tmp_path, 3 * QUICK_IMAGES, enough=1)
    except (struct.error, IndexError, AssertionError) as e:  # what was replayed does not even decode
        found = [str(e)]
    assert found != []


@pytest.mark.parametrize("bug", IMAGE_BUGS)
@needs("strace")
def test_a_bug_of_the_order_of_writes_is_found(tmp_path: Path, bug: str) -> None:
    assert failures(record(60, (f"bug={bug}",)), tmp_path, 3 * QUICK_IMAGES, enough=1) != []


def test_the_recorded_trace_is_rich_enough() -> None:
    """It replays, goes from file to file, collects, and uses files again, with names that are not durable yet."""
    events = load(RECORDED).events
    assert sum(isinstance(e, Acked) for e in events) == 60
    assert sum(isinstance(e, Sync) and e.file.startswith(DATA_FILE) for e in events) >= 20
    assert max(e.log_start for e in events if isinstance(e, Acked)) > 0, "there is something to collect"
    names = [e.name for e in events if isinstance(e, Named)]
    for suffix, count in ((".log", 8), (".sorted", 3), (".spare", 2)):
        assert len([name for name in names if name.endswith(suffix)]) >= count, suffix
    assert any(isinstance(e, Named) and e.old.endswith(".spare") for e in events), "a file was used again"
    rounds = [e for e in events if isinstance(e, Write) and not e.file.startswith(DATA_FILE)]
    assert len([e for e in rounds if len(e.data) > PAGE_BYTES]) >= 10, "rounds may be torn between pages"


def test_the_recorded_trace_of_compaction_is_rich_enough() -> None:
    """It was recorded with the course as it is now, the index took rounds between installations, and these removed
    records, joined batches, replaced segments and let the log grow."""
    events, steps = load(OF_COMPACTION).events, list(course())
    acked = [event for event in events if isinstance(event, Acked)]
    assert [(e.log_end, e.journal_index) for e in acked] == [(s.log[-1].end, n) for n, s in enumerate(steps, 1)]
    assert sum(isinstance(event, Sync) and event.file.startswith(DATA_FILE) for event in events) >= 4
    installed = [(before, step) for before, step in pairwise(steps) if step.end]
    assert len(installed) >= 6
    assert any(step.end > before.log[-1].end for before, step in installed)
    assert any(len(before.segments) > len(step.segments) for before, step in installed)
    assert all(parse_header(step.log[0].batch).count == 0 for _, step in installed)
    assert any(len(step.log) < len(before.log) for before, step in installed)


def test_a_round_is_one_write_that_waits_for_the_disk() -> None:
    """The counts of one round: between two acknowledgements the log sees nothing else, but where it leaves a file."""
    rounds: list[list[Write | Truncate | Sync]] = [[]]
    for event in load(RECORDED).events:
        if isinstance(event, Acked):
            rounds.append([])
        elif isinstance(event, Write | Sync) and not event.file.startswith(DATA_FILE):
            rounds[-1].append(event)
    plain = [r for r in rounds if len(r) == 1 and isinstance(r[0], Write) and r[0].is_synced]
    assert len(plain) >= 25
    assert sum(len(e.data) == PAGE_BYTES for r in plain for e in r if isinstance(e, Write)) >= 15


def test_unsynced_writes_may_be_missing_and_synced_ones_never_are() -> None:
    trace = parse(
        ["n f f ", "N", "d 0 AAAA", "d 1 AQEB", "w f 0 0", "s f", "W f 3 0", "a 0 0 0", "w f 0 1", "a 0 1 1", "a 0 1 1"]
    )
    seen = {image.files["f"] for image in images(trace, 1, 200)}
    assert seen == {bytes(6), b"\x01\x01\x01" + bytes(3)}


def test_a_sync_of_one_file_leaves_the_other_unsynced() -> None:
    trace = parse(["n f f ", "n g g ", "N", "d 0 AQ==", "w f 0 0", "w g 0 0", "s f", "a 0 0 0", "a 0 0 0", "a 0 0 0"])
    seen = {tuple(sorted(name for name, data in image.files.items() if data)) for image in images(trace, 1, 200)}
    assert seen == {("f",), ("f", "g")}


def test_a_trace_round_trips(tmp_path: Path) -> None:
    trace = load(RECORDED)
    (tmp_path / "again").write_bytes(dump(trace))
    assert load(tmp_path / "again").events == trace.events


def strace_lines(*lines: str) -> list[str]:
    """With strings as strace's option -xx shows them."""
    return [
        re.sub('"([^"]*)"', lambda found: '"' + "".join(f"\\x{byte:02x}" for byte in found[1].encode()) + '"', line)
        for line in (
            '1  openat(AT_FDCWD, "node/data.mdb", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = 5',
            '1  openat(AT_FDCWD, "node/log/0000000001.log", O_RDWR|O_CLOEXEC <unfinished ...>',
            '2  write(3, "wakes", 5)             = 5',
            "1  <... openat resumed>)            = 6",
            *lines,
            "1  +++ exited with 0 +++",
        )
    ]


def test_calls_of_two_threads_are_recorded_as_late_as_their_effects_are_certain() -> None:
    """A sync counts from its end on, and an acknowledgement from its beginning."""
    lines = strace_lines(
        '2  pwrite64(5, "page", 4, 8 <unfinished ...>',
        '1  write(1, "acked 0 1 1", 11 <unfinished ...>',
        "2  <... pwrite64 resumed>)          = 4",
        "2  fdatasync(5 <unfinished ...>",
        "1  <... write resumed>)             = 11",
        '1  write(1, "acked 0 2 2", 11)      = 11',
        "2  <... fdatasync resumed>)         = 0",
        "2  close(5 <unfinished ...>",
        '1  openat(AT_FDCWD, "elsewhere", O_RDWR) = 5',
        "2  <... close resumed>)             = 0",
        '1  pwrite64(5, "other", 5, 0)       = 5',
    )
    file = f"{DATA_FILE}#0"
    assert Reader(Path("node")).read(lines).events[2:] == [
        Acked(0, 1, 1),
        Write(file, 8, b"page", False),
        Acked(0, 2, 2),
        Sync(file),
    ]


def test_two_calls_at_a_time_on_one_file_are_not_recorded() -> None:
    """The sync may not wait for the write."""
    of_two_files = ["2  fdatasync(5 <unfinished ...>", '1  pwrite64(6, "page", 4, 8)        = 4']
    Reader(Path("node")).read(strace_lines(*of_two_files))
    for write in ('1  pwrite64(5, "page", 4, 8)        = 4', '1  pwrite64(5, "page", 4, 8 <unfinished ...>'):
        with pytest.raises(RecordingError, match=r"two calls at a time on data\.mdb"):
            Reader(Path("node")).read(strace_lines(of_two_files[0], write))


@pytest.mark.full
@pytest.mark.timeout(1800)
@needs("strace")
def test_ten_thousand_images_of_a_fresh_trace_hold_every_acknowledged_record(tmp_path: Path) -> None:
    assert failures(record(SUBMISSIONS), tmp_path, FULL_IMAGES) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("option", ["metasync=False", "sync=False"])
@needs("strace")
def test_a_store_without_its_syncs_loses_acknowledged_records(tmp_path: Path, option: str) -> None:
    assert failures(record(60, (option,)), tmp_path, 1_500, enough=1) != []


@pytest.mark.full
@pytest.mark.timeout(1800)
@needs("strace")
def test_thousands_of_images_of_a_fresh_trace_hold_the_old_segments_or_the_new_ones(tmp_path: Path) -> None:
    assert failures(record_compaction(), tmp_path, IMAGES_OF_COMPACTION, judge=verdict) == []
