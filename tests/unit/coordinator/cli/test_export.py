"""`smq topic export`: the file holds exactly the records, or does not exist."""

import contextlib
import errno
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result

from smq.clients import ConsumerRecord
from smq.coordinator.cli import export_files
from smq.coordinator.cli.export_files import ParquetFile, record_file
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import FakeCluster
from tests.unit.coordinator.cli.test_data_commands import Smq, numbered

RECORDS: list[dict[str, object]] = [
    {"value_base64": "/wA=", "key": None, "headers": [{"key": "h", "value_base64": "/w=="}], "timestamp_ms": 77},
    {"value": "", "key": "ü", "headers": [{"key": "h", "value": None}], "timestamp_ms": 2**53 + 1},
    {"value": None, "key": "", "timestamp_ms": 0},
]


def produce_records(smq: Smq, tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    assert smq("produce", "t", source, "--format", "records", "--partition", 0).exit_code == 0


def exported(smq: Smq, path: Path, *options: object) -> list[dict[str, Any]]:
    result = smq("topic", "export", "t", "--output", path, *options)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(result: Result, expected: str) -> None:
    assert result.exit_code in (1, 2)
    assert expected in result.stderr


def test_jsonl_has_every_field_and_produce_reads_it_back(smq: Smq, tmp_path: Path) -> None:
    produce_records(smq, tmp_path)
    first = exported(smq, tmp_path / "out.jsonl")
    assert [row["_index"] for row in first] == [0, 1, 2]
    assert all(isinstance(row["ts_ns"], int) and row["ts_ns"] > 0 for row in first)
    for row, record in zip(first, RECORDS, strict=True):
        assert {name: row.get(name) for name in record} == record
    again = smq("produce", "t", tmp_path / "out.jsonl", "--format", "records", "--partition", 1)
    assert again.exit_code == 0
    second = exported(smq, tmp_path / "copy.jsonl", "--partition", 1)
    for row in [*first, *second]:
        del row["partition"], row["ts_ns"]
    assert first == second


def test_parquet_has_every_field_with_its_type(smq: Smq, tmp_path: Path) -> None:
    produce_records(smq, tmp_path)
    path = tmp_path / "out.parquet"
    assert smq("topic", "export", "t", "--output", path).exit_code == 0
    table = pq.read_table(path)
    assert {f.name: str(f.type) for f in table.schema} == {
        "topic": "string",
        "partition": "int32",
        "_index": "int64",
        "ts_ns": "int64",
        "timestamp": "timestamp[ms, tz=UTC]",
        "key": "binary",
        "value": "binary",
        "headers": "list<element: struct<key: string not null, value: binary> not null>",
    }
    assert table["_index"].to_pylist() == [0, 1, 2]
    assert table["key"].to_pylist() == [None, "ü".encode(), b""]
    assert table["value"].to_pylist() == [b"\xff\0", b"", None]
    assert table["timestamp"].cast("int64").to_pylist() == [77, 2**53 + 1, 0]
    assert table["headers"].to_pylist() == [[{"key": "h", "value": b"\xff"}], [{"key": "h", "value": None}], []]


def test_partitions_come_one_after_another_in_offset_order(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 30)
    for partition in (1, 2):
        assert smq("produce", "t", tmp_path / "numbers.txt", "--partition", partition).exit_code == 0
    rows = exported(smq, tmp_path / "out.jsonl")
    assert [(row["partition"], row["_index"]) for row in rows] == [(p, i) for p in range(3) for i in range(30)]
    chosen = exported(smq, tmp_path / "two.jsonl", "--partition", 2, "--partition", 0)
    assert [row["partition"] for row in chosen] == [0] * 30 + [2] * 30


def test_range_is_inclusive_and_exclusive(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 30)
    rows = exported(smq, tmp_path / "out.jsonl", "--partition", 0, "--from", 7, "--to", 19)
    assert [row["_index"] for row in rows] == list(range(7, 19))
    assert exported(smq, tmp_path / "none.jsonl", "--partition", 0, "--from", 30) == []


def test_range_outside_the_log_is_refused_with_the_valid_one(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 30)
    path = tmp_path / "out.jsonl"
    for options in (("--to", 31), ("--from", 31), ("--from", 20, "--to", 10)):
        result = smq("topic", "export", "t", "--output", path, "--partition", 0, *options)
        refused(result, "t/0, which holds offsets [0, 30)")
    assert not path.exists()


def test_contradictory_options_are_refused(smq: Smq, tmp_path: Path) -> None:
    refused(smq("topic", "export", "t", "--output", tmp_path / "a.jsonl", "--from", 1), "name one with --partition")
    refused(smq("topic", "export", "t", "--output", tmp_path / "a.txt"), "pass --format jsonl or parquet")
    refused(smq("topic", "export", "nope", "--output", tmp_path / "a.jsonl"), "no topic 'nope'")
    refused(smq("topic", "export", "t", "--output", tmp_path / "no" / "a.jsonl"), "cannot be written")
    assert list(tmp_path.iterdir()) == []


def test_file_that_exists_is_replaced_only_with_force(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 3)
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    refused(smq("topic", "export", "t", "--output", path), "--force")
    assert path.read_text() == "mine\n"
    assert len(exported(smq, path, "--force")) == 3


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_export_that_fails_leaves_nothing_behind(cluster: FakeCluster, smq: Smq, tmp_path: Path, name: str) -> None:
    """Retention passes the range between its choice and its reading."""
    numbered(smq, tmp_path, 30)
    (tmp_path / "numbers.txt").unlink()

    async def gone(call: str, request: object) -> None:
        if call == "Fetch":
            cluster.partition("t", 0).log_start = 20
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, "the log starts at 20")

    cluster.nodes[1].hook = gone
    assert smq("topic", "export", "t", "--output", tmp_path / name).exit_code == 1
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    expected = r"out\.jsonl cannot be written: No space left"
    with pytest.raises(UserError, match=expected), record_file(tmp_path / "out.jsonl", "jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group may take many seconds, and the file is thrown away."""
    written: list[object] = []
    monkeypatch.setattr(ParquetFile, "_write_group", written.append)
    with contextlib.suppress(KeyboardInterrupt), record_file(tmp_path / "out.parquet", "parquet") as file:
        file.write([ConsumerRecord("t", 0, 0, 0, 0, None, b"v", ())])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    assert written == []


def test_a_new_file_may_be_read_by_others(tmp_path: Path) -> None:
    with record_file(tmp_path / "out.jsonl", "jsonl"):
        pass
    (tmp_path / "usual").touch()
    assert (tmp_path / "out.jsonl").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_parquet_without_pyarrow_says_what_to_install(
    smq: Smq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(smq("topic", "export", "t", "--output", tmp_path / "a.parquet"), "pip install '.[spark]' in a clone of smq")
    assert list(tmp_path.iterdir()) == []


def test_parquet_keeps_no_more_than_a_row_group_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_files, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(export_files, "ROW_GROUP_BYTES", 500)
    path = tmp_path / "out.parquet"
    records = [ConsumerRecord("t", 0, i, i, i, None, b"v" * (1 if i < 25 else 250), ()) for i in range(29)]
    with record_file(path, "parquet") as file:
        file.write(records)
    groups = [pq.ParquetFile(path).metadata.row_group(i).num_rows for i in range(pq.ParquetFile(path).num_row_groups)]
    assert groups == [10, 10, 7, 2]
