"""The comparison's page: its aims, its tables, and the shares of a profile, from figures that are made up here."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.peers import aims, page, profile
from benchmarks.peers.lines import JAVA_PRODUCES, LINES, SINGLE
from benchmarks.peers.systems import Smq
from benchmarks.report import Report

SYSTEMS = ("smq", "Kafka", "Kafka, fsync", "etcd", "NATS")


def test_a_cluster_that_did_not_start_can_be_stopped(tmp_path: Path) -> None:
    """Otherwise that error would hide why."""
    Smq(tmp_path).stop()


def medians(**changed: float) -> dict[tuple[str, str], dict[str, Any]]:
    """All systems have the same figures, but for smq's that are `changed`."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in LINES:
        for system in SYSTEMS:
            row: dict[str, Any] = {"line": line.name, "system": system, line.judged: 100.0, "p99_ms": 200.0}
            row |= {"nodes_cpu_s_per_million": 10.0, "written_per_byte": 5.0, "private_mb": 300.0, "start_s": 1.0}
            if line.judged == "gap_ms":
                row = {"line": line.name, "system": system, "gap_ms": 100.0, "private_mb": 200.0, "start_s": 1.0}
            rows[line.name, system] = row | (changed if system == "smq" else {})
    return rows


def verdict(line: str, figure: str, other: str | None, rows: aims.Rows) -> aims.Verdict:
    (found,) = [
        v for v in aims.verdicts(rows) if (v.aim.line, v.aim.figure, v.aim.other) == (line, figure, other)
    ]  # fmt: skip
    return found


def test_a_rate_just_below_its_aim_is_missed_though_it_would_round_to_it() -> None:
    missed = verdict(JAVA_PRODUCES, "records_per_s", "Kafka", medians(records_per_s=118.1))
    reached = verdict(JAVA_PRODUCES, "records_per_s", "Kafka", medians(records_per_s=120.0))
    assert missed.limit == pytest.approx(120.0)
    assert (missed.is_reached, reached.is_reached) == (False, True)


def test_a_latency_is_judged_by_what_etcd_needs_and_a_fifth_of_a_millisecond() -> None:
    assert verdict(SINGLE, "p50_ms", "etcd", medians(p50_ms=100.2)).is_reached
    assert not verdict(SINGLE, "p50_ms", "etcd", medians(p50_ms=100.3)).is_reached
    assert not verdict(SINGLE, "p99_ms", "etcd", medians(p99_ms=401.0)).is_reached


def test_every_line_that_kafka_has_is_judged_by_its_processor_time() -> None:
    judged = {aim.line for aim in aims.AIMS if aim.figure == "nodes_cpu_s_per_million"}
    assert {line.name for line in LINES if "kafka" in line.drivers and line.judged != "gap_ms"} <= judged


def test_an_aim_without_the_other_system_is_not_judged() -> None:
    rows = {key: row for key, row in medians().items() if key[1] != "etcd"}
    assert not [v for v in aims.verdicts(rows) if v.aim.other == "etcd"]


def document(rows: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    flushes = dict.fromkeys(SYSTEMS, "a disk")
    return {
        "commit": "abc", "machine": {"python": "3.11.0", "cores": 2}, "rounds": 3, "flushes": flushes,
        "failures": {"etcd": "no Go"}, "medians": list(rows.values()), "all": {},
    }  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with the parts that are rewritten."""
    written = tmp_path / "performance.md"
    parts = ("peers", "python -m benchmarks peers --write"), ("profile", profile.COMMAND)
    written.write_text("".join(f"<!-- {name}: written by `{by}` -->\nold\n<!-- /{name} -->\n" for name, by in parts))
    monkeypatch.setattr(pages, "PAGE", written)
    monkeypatch.setattr(pages, "KEPT", tmp_path)
    return written


def test_the_page_counts_the_aims_that_are_reached_and_lists_all_others(kept: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps(document(medians(written_per_byte=7.0))))
    page.write_page(result)
    text = kept.read_text()
    judged = list(aims.verdicts(medians(written_per_byte=7.0)))
    missed = [verdict for verdict in judged if not verdict.is_reached]
    assert f"Of {len(judged)} aims, {len(judged) - len(missed)} are reached." in text
    assert len(text.partition("Missed:\n\n")[2].partition("\n\n")[0].splitlines()) == len(missed)
    assert f"- {JAVA_PRODUCES}, bytes to disk per byte: 7.00, at most 6.00" in text
    assert "etcd: no Go" in text


def test_the_memory_on_the_page_is_that_of_all_three_nodes(kept: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps(document(medians())))
    page.write_page(result)
    assert "smq 300 MB" in kept.read_text()  # the kill leaves two, with 200


def test_samples_count_for_the_innermost_function_of_smq_and_waits_do_not_count() -> None:
    loop = "run_server (/a/smq/coordinator/server/composition.py:9);Loop.run (uvloop/loop.so)"
    samples = profile.Samples()
    samples.add(
        [
            f"{loop};Call.start (/a/smq/coordinator/kafka/produce.py:1);append (/a/smq/replication/log/reader.py:2) 3",
            f"{loop};write (/a/smq/replication/net/tcp.py:1);writev (libc.so.6) 4",
            f"{loop};uv_run (uvloop/loop.so) 2",
            f"{loop};epoll_wait (libc.so.6) 90",
            "_write (/a/smq/replication/storage/disk.py:3);get (x.c);PyThread_acquire_lock_timed (libpython3.11.so) 80",
            "spawn (/a/site-packages/smq/none.py:1) 1",
        ]
    )
    shares = samples.shares()
    assert {room: share for room, share in shares.items() if share} == {"log": 30, "links": 40, "uvloop": 30}
    assert samples.top()[0] == ("write (replication/net/tcp.py)", 40.0)


def test_the_profile_is_a_table_of_rooms(kept: Path) -> None:
    report, samples = Report(), profile.Samples()
    samples.add(["append (/a/smq/replication/log/reader.py:2) 3", "x (/a/smq/replication/raft/engine.py:2) 1"])
    profile.add(report, SINGLE, samples)
    profile.write_profile(report)
    assert f"| {SINGLE} | 0 | 0 | 0 | 75 | 25 |" in kept.read_text()
