"""The audit log: its lines, its bounds, and what it leaves out."""

import json
from pathlib import Path
from typing import Any

from smq.coordinator.limits import AUDIT_LINES_WAITING_MAX, AUDIT_NAMES_MAX, AUDIT_REFUSED_BYTES_PER_MINUTE_MAX
from smq.coordinator.service.audit import OFF, Audit, Sender

ALICE = Sender(user="alice", address="10.0.0.1", port="kafka", listener="outside")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_say_who_did_what_and_with_what_result(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "a", file_bytes_max=1 << 20, files=2)
    audit.acted(ALICE, "CreateTopics", ["a", "b"], {}, refused=False)
    audit.acted(ALICE, "CreateTopics", ["a"], {"a": "TOPIC_ALREADY_EXISTS"}, refused=False)
    audit.acted(ALICE, "DeleteTopics", [f"{n}" * 600 for n in range(150)], {"": "X"}, refused=True)
    audit.acted(ALICE, "DeleteTopics", ["gone"], None)
    for _ in range(3):  # named once
        audit.refused(ALICE, "Fetch", "no right")
    audit.close()
    done, failed, refused, unknown, other = lines(tmp_path / "a")
    sender = {"user": "alice", "address": "10.0.0.1", "port": "kafka", "listener": "outside"}
    assert done == sender | {"time": done["time"], "act": "CreateTopics", "result": "done", "on": ["a", "b"]}
    assert (failed["result"], failed["errors"]) == ("failed", {"a": "TOPIC_ALREADY_EXISTS"})
    assert (refused["result"], len(refused["on"])) == ("refused", AUDIT_NAMES_MAX + 1)
    assert len(json.dumps(refused)) < 60_000
    assert unknown["result"] == "unknown"
    assert (other["act"], other["why"]) == ("Fetch", "no right")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_files_are_rotated_and_the_oldest_are_gone(tmp_path: Path) -> None:
    for files in (3, 1):
        path = tmp_path / f"{files}"
        audit = Audit(path, file_bytes_max=1_000, files=files)
        for number in range(40):
            audit.acted(ALICE, "DeleteTopics", [str(number)], {}, refused=False)
        audit.close()
        found = sorted(tmp_path.glob(f"{files}*"))
        assert len(found) == files
        assert all(file.stat().st_size <= 1_000 for file in found)
        kept = [line["on"][0] for file in sorted(found, reverse=True) for line in lines(file)]
        assert kept == [str(number) for number in range(40 - len(kept), 40)]


def test_a_flood_of_refusals_does_not_push_out_what_was_done(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "a", file_bytes_max=3 * AUDIT_REFUSED_BYTES_PER_MINUTE_MAX, files=1)
    audit.acted(ALICE, "DeleteTopics", ["first"], {})
    for number in range(1_000):
        audit.refused(ALICE, "SaslAuthenticate", f"user {number} \x9b{'x' * 300}")
        audit.acted(ALICE, "DeleteTopics", [f"{number}" * 100], {"": "X"}, refused=True)
    for name in ("done in part", "last"):
        audit.acted(ALICE, "DeleteTopics", [name], {"hidden": "X"}, refused=name != "last", in_part=True)
    audit.close()
    first, *refused, part, last = lines(tmp_path / "a")
    assert (first["on"], part["on"], last["on"]) == (["first"], ["done in part"], ["last"])
    assert len(refused) + part["lost_before"] == 2_000
    assert (tmp_path / "a").read_text().isascii()


def test_a_disk_that_fails_or_lags_costs_lines_and_no_request(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a"
    audit = Audit(path, file_bytes_max=1 << 20, files=1)
    audit.acted(ALICE, "DeleteTopics", ["lost"], {}, refused=False)
    audit._thread.submit(path.parent.mkdir).result()
    audit._waiting.extend([{}] * AUDIT_LINES_WAITING_MAX)
    audit.acted(ALICE, "DeleteTopics", ["lost, too"], {}, refused=False)
    audit._waiting.clear()
    audit.acted(ALICE, "DeleteTopics", ["kept"], {}, refused=False)
    audit.close()
    (kept,) = lines(path)
    assert (kept["on"], kept["lost_before"]) == (["kept"], 2)


def test_without_a_path_or_files_nothing_is_written(tmp_path: Path) -> None:
    for audit in (OFF, Audit(tmp_path / "a", file_bytes_max=1, files=0)):
        audit.acted(ALICE, "DeleteTopics", ["t"], {}, refused=False)
        audit.refused(ALICE, "Fetch", "no right")
        assert not audit._waiting
    assert not list(tmp_path.iterdir())
