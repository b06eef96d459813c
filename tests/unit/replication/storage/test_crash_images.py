"""Power losses in the middle of real commits: whichever unsynced sectors of the files survive, the store opens and
holds every acknowledged batch and entry. It does not with the bugs planted here."""

import re
import struct
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import pytest

from chaos_tests.crash.compacting import course, verdict
from chaos_tests.crash.recorder import Reader, RecordingError, record, record_compaction
from chaos_tests.crash.stores import FILES
from chaos_tests.crash.trace import Acked, Sync, Trace, Truncate, Write, dump, images, load, parse
from chaos_tests.crash.verify import log_and_journal
from chaos_tests.sim.long_runs import SUBMISSIONS, image_failures
from smq.records import parse_header
from smq.replication.ports import Disk
from smq.replication.storage import write_ahead
from smq.replication.storage.database_sqlite import JOURNAL_FILE
from smq.replication.storage.engine import Engine
from smq.replication.storage.environment_lmdb import DATA_FILE
from smq.replication.storage.write_ahead import PAGE_BYTES, WRITE_AHEAD_FILE
from tests.skips import needs

RECORDED = Path(__file__).parent / "crash_trace.txt"  # python -m chaos_tests.crash.recorder FILE lmdb 60
OF_SQLITE = Path(__file__).parent / "crash_trace_of_sqlite.txt"  # python -m chaos_tests.crash.recorder FILE sqlite 60
OF_COMPACTION = Path(__file__).parent / "crash_trace_of_compaction.txt"  # ... FILE lmdb compacting
OF_COMPACTION_IN_SQLITE = Path(__file__).parent / "crash_trace_of_compaction_sqlite.txt"  # ... FILE sqlite compacting
Judge = Callable[[Disk, Acked], str]
QUICK_IMAGES = 100
FULL_IMAGES, IMAGES_OF_COMPACTION = 10_000, 2_000


def failures(
    recorded: Path | Trace, folder: Path, count: int, *, enough: int = 1 << 30, judge: Judge = log_and_journal
) -> list[str]:
    trace = load(recorded) if isinstance(recorded, Path) else recorded
    return list(islice(image_failures(trace, folder, count, judge=judge), enough))


@pytest.mark.parametrize(
    ("recorded", "judge"),
    [
        (RECORDED, log_and_journal),
        (OF_SQLITE, log_and_journal),
        (OF_COMPACTION, verdict),
        (OF_COMPACTION_IN_SQLITE, verdict),
    ],
)
def test_every_image_of_a_recorded_trace_holds_every_acknowledged_record(
    tmp_path: Path, recorded: Path, judge: Judge
) -> None:
    """And the old segments or the new ones, as their rows say."""
    assert failures(recorded, tmp_path, QUICK_IMAGES, judge=judge) == []


@pytest.mark.parametrize(
    ("recorded", "file", "judge"),
    [
        (RECORDED, DATA_FILE, log_and_journal),
        (RECORDED, WRITE_AHEAD_FILE, log_and_journal),
        *((OF_SQLITE, file, log_and_journal) for file in FILES[Engine.SQLITE]),
        (OF_COMPACTION, DATA_FILE, verdict),
        (OF_COMPACTION, WRITE_AHEAD_FILE, verdict),
        (OF_COMPACTION_IN_SQLITE, JOURNAL_FILE, verdict),
    ],
)
def test_a_store_that_does_not_wait_for_its_disk_is_detected(
    tmp_path: Path, recorded: Path, file: str, judge: Judge
) -> None:
    assert failures(load(recorded).without_syncs(file), tmp_path, QUICK_IMAGES, enough=1, judge=judge) != []


def test_a_write_ahead_file_used_again_before_lmdb_is_durable_is_detected(tmp_path: Path) -> None:
    assert failures(load(RECORDED).with_late_syncs(DATA_FILE), tmp_path, QUICK_IMAGES, enough=1) != []


def _rows_unchecked(data: bytes, at: int, _generation: bytes, _number: int) -> bytes | None:
    """As `_rows_at`, but whatever lies there is replayed if its length fits."""
    size = write_ahead._HEAD.unpack_from(data, at)[3]
    stop = at + write_ahead.frame_bytes(size)
    if not size or stop > len(data):
        return None
    sectors = [data[start : start + write_ahead._CONTENT_BYTES] for start in range(at, stop, write_ahead.SECTOR_BYTES)]
    return b"".join(sectors)[write_ahead._HEAD.size : write_ahead._HEAD.size + size]


def _rows_of_any_generation(data: bytes, at: int, _generation: bytes, number: int) -> bytes | None:
    """As `_rows_at`, but of the generation that happens to lie there."""
    found = write_ahead._HEAD.unpack_from(data, at)[1]
    return CHECKED(data, at, found, number) if any(found) else None


CHECKED = write_ahead._rows_at


@pytest.mark.parametrize("rows_at", [_rows_unchecked, _rows_of_any_generation])
def test_a_replay_of_frames_that_are_torn_or_stale_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at: Callable[[bytes, int, bytes, int], bytes | None]
) -> None:
    monkeypatch.setattr(write_ahead, "_rows_at", rows_at)
    monkeypatch.setattr(write_ahead, "_check_first", lambda _data, _active: None)
    try:
        found = failures(load(RECORDED), tmp_path, QUICK_IMAGES, enough=1)
    except struct.error as e:  # what was replayed does not even decode
        found = [str(e)]
    assert found != []


def test_the_recorded_trace_is_rich_enough() -> None:
    events = load(RECORDED).events
    assert sum(isinstance(e, Acked) for e in events) == 60
    assert sum(isinstance(e, Sync) and e.file == DATA_FILE for e in events) >= 10
    assert max(e.log_start for e in events if isinstance(e, Acked)) > 0, "pages were freed and used again"
    write_ahead_writes = [e for e in events if isinstance(e, Write) and e.file == WRITE_AHEAD_FILE and e.is_synced]
    assert len([e for e in write_ahead_writes if e.offset == 0]) >= 10, "the file was used again"
    assert len([e for e in write_ahead_writes if len(e.data) > PAGE_BYTES]) >= 10, "frames may be torn between pages"


def test_the_recorded_trace_of_sqlite_is_rich_enough() -> None:
    events = load(OF_SQLITE).events
    assert sum(isinstance(e, Acked) for e in events) == 60
    assert sum(isinstance(e, Sync) and e.file == Engine.SQLITE.data_file for e in events) >= 4, "checkpoints"
    assert sum(isinstance(e, Sync) and e.file == JOURNAL_FILE for e in events) >= 10
    journal = [e for e in events if isinstance(e, Write) and e.file == JOURNAL_FILE]
    assert len([e for e in journal if e.offset == 0]) >= 3, "the journal began again"
    assert max(e.log_start for e in events if isinstance(e, Acked)) > 0, "pages were freed and used again"


def test_the_recorded_trace_of_compaction_is_rich_enough() -> None:
    """It was recorded with the course as it is now, LMDB took the rows over between installations, and these removed
    records, joined batches, replaced segments and let the log grow."""
    events, steps = load(OF_COMPACTION).events, list(course())
    acked = [event for event in events if isinstance(event, Acked)]
    assert [(e.log_end, e.journal_index) for e in acked] == [(s.log[-1].end, n) for n, s in enumerate(steps, 1)]
    assert sum(isinstance(event, Sync) and event.file == DATA_FILE for event in events) >= 4
    installed = [(before, step) for before, step in pairwise(steps) if step.end]
    assert len(installed) >= 6
    assert any(step.end > before.log[-1].end for before, step in installed)
    assert any(len(before.segments) > len(step.segments) for before, step in installed)
    assert all(parse_header(step.log[0].batch).count == 0 for _, step in installed)
    assert any(len(step.log) < len(before.log) for before, step in installed)


def test_a_small_round_is_one_write_of_one_page_that_waits_for_the_disk() -> None:
    """The counts of one round: between two acknowledgements there is nothing but that write."""
    rounds: list[list[Write | Truncate | Sync]] = [[]]
    for event in load(RECORDED).events:
        if isinstance(event, Acked):
            rounds.append([])
        else:
            rounds[-1].append(event)
    ahead = [r for r in rounds if not any(e.file == DATA_FILE for e in r)]
    assert len(ahead) >= 40
    assert all(len(r) == 1 and isinstance(r[0], Write) and r[0].is_synced for r in ahead[:-1])
    assert sum(len(e.data) == PAGE_BYTES for r in ahead for e in r if isinstance(e, Write)) >= 20


def test_unsynced_writes_may_be_missing_and_synced_ones_never_are() -> None:
    trace = parse(["d 0 AAAA", "d 1 AQEB", "w f 0 0", "s f", "W f 3 0", "a 0 0 0", "w f 0 1", "a 0 1 1", "a 0 1 1"])
    seen = {image.files["f"] for image in images(trace, 1, 200)}
    assert seen == {bytes(6), b"\x01\x01\x01" + bytes(3)}


def test_a_sync_of_one_file_leaves_the_other_unsynced() -> None:
    trace = parse(["d 0 AQ==", "w f 0 0", "w g 0 0", "s f", "a 0 0 0", "a 0 0 0", "a 0 0 0"])
    seen = {tuple(sorted(image.files)) for image in images(trace, 1, 200)}
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
            '1  openat(AT_FDCWD, "node/data.sqlite3", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = 5',
            '1  openat(AT_FDCWD, "node/data.sqlite3-wal", O_RDWR|O_CLOEXEC <unfinished ...>',
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
    file = Engine.SQLITE.data_file
    assert Reader(Path("node"), Engine.SQLITE).read(lines).events == [
        Acked(0, 1, 1),
        Write(file, 8, b"page", False),
        Acked(0, 2, 2),
        Sync(file),
    ]


def test_two_calls_at_a_time_on_one_file_are_not_recorded() -> None:
    """The sync may not wait for the write."""
    of_two_files = ["2  fdatasync(5 <unfinished ...>", '1  pwrite64(6, "page", 4, 8)        = 4']
    Reader(Path("node"), Engine.SQLITE).read(strace_lines(*of_two_files))
    for write in ('1  pwrite64(5, "page", 4, 8)        = 4', '1  pwrite64(5, "page", 4, 8 <unfinished ...>'):
        with pytest.raises(RecordingError, match=r"two calls at a time on data\.sqlite3"):
            Reader(Path("node"), Engine.SQLITE).read(strace_lines(of_two_files[0], write))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", list(Engine))
@needs("strace")
def test_ten_thousand_images_of_a_fresh_trace_hold_every_acknowledged_record(tmp_path: Path, engine: Engine) -> None:
    assert failures(record(SUBMISSIONS, engine=engine), tmp_path, FULL_IMAGES) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engine", "option"),
    [(Engine.LMDB, "metasync=False"), (Engine.LMDB, "sync=False"), (Engine.SQLITE, "synchronous=NORMAL")],
)
@needs("strace")
def test_a_store_without_its_syncs_loses_acknowledged_records(tmp_path: Path, engine: Engine, option: str) -> None:
    assert failures(record(60, (option,), engine), tmp_path, 1_500, enough=1) != []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", list(Engine))
@needs("strace")
def test_thousands_of_images_of_a_fresh_trace_hold_the_old_segments_or_the_new_ones(
    tmp_path: Path, engine: Engine
) -> None:
    assert failures(record_compaction(engine), tmp_path, IMAGES_OF_COMPACTION, judge=verdict) == []
