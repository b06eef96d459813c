"""Power losses while segments are installed: the log opens, and holds the old segment or the new one, as its row says.

The trace is of a real process: `python -m chaos_tests.crash.recorder FILE lmdb compacting`, and sqlite.
"""

from itertools import islice, pairwise
from pathlib import Path

import pytest

from chaos_tests.crash.compacting import course, verdict
from chaos_tests.crash.recorder import record_compaction
from chaos_tests.crash.trace import Acked, Sync, Trace, load
from chaos_tests.sim.long_runs import image_failures
from smq.records import parse_header
from smq.replication.storage.database_sqlite import JOURNAL_FILE
from smq.replication.storage.engine import Engine
from smq.replication.storage.environment_lmdb import DATA_FILE
from smq.replication.storage.write_ahead import WRITE_AHEAD_FILE
from tests.skips import needs

RECORDED = Path(__file__).parent / "crash_trace_of_compaction.txt"
OF_SQLITE = Path(__file__).parent / "crash_trace_of_compaction_sqlite.txt"
QUICK_IMAGES = 100
FULL_IMAGES = 2_000


def failures(trace: Trace, folder: Path, count: int, *, enough: int = 1 << 30) -> list[str]:
    return list(islice(image_failures(trace, folder, count, judge=verdict), enough))


@pytest.mark.parametrize("recorded", [RECORDED, OF_SQLITE])
def test_every_image_holds_the_old_segments_or_the_new_ones(tmp_path: Path, recorded: Path) -> None:
    assert failures(load(recorded), tmp_path, QUICK_IMAGES) == []


@pytest.mark.parametrize(
    ("recorded", "file"), [(RECORDED, DATA_FILE), (RECORDED, WRITE_AHEAD_FILE), (OF_SQLITE, JOURNAL_FILE)]
)
def test_a_store_that_does_not_wait_for_its_disk_is_detected(tmp_path: Path, recorded: Path, file: str) -> None:
    assert failures(load(recorded).without_syncs(file), tmp_path, QUICK_IMAGES, enough=1) != []


def test_the_recorded_trace_is_rich_enough() -> None:
    """It was recorded with the course as it is now, LMDB took the rows over between installations, and these removed
    records, joined batches, replaced segments and let the log grow."""
    events, steps = load(RECORDED).events, list(course())
    acked = [event for event in events if isinstance(event, Acked)]
    assert [(e.log_end, e.journal_index) for e in acked] == [(s.log[-1].end, n) for n, s in enumerate(steps, 1)]
    assert sum(isinstance(event, Sync) and event.file == DATA_FILE for event in events) >= 4
    installed = [(before, step) for before, step in pairwise(steps) if step.end]
    assert len(installed) >= 6
    assert any(step.end > before.log[-1].end for before, step in installed)
    assert any(len(before.segments) > len(step.segments) for before, step in installed)
    assert all(parse_header(step.log[0].batch).count == 0 for _, step in installed)
    assert any(len(step.log) < len(before.log) for before, step in installed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", list(Engine))
@needs("strace")
def test_thousands_of_images_of_a_fresh_trace_hold_the_old_segments_or_the_new_ones(
    tmp_path: Path, engine: Engine
) -> None:
    assert failures(record_compaction(engine), tmp_path, FULL_IMAGES) == []
