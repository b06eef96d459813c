"""`smq topic`, `produce`, `consume` and `status`, as a user types them, against a fake cluster."""

import json
import os
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE
from smq.coordinator.cli.root import cli
from smq.coordinator.tls.certificates import make_authority, make_client
from smq.raft_state.ids import RING_SLOTS_PER_PARTITION, PartitionIndex, ring_range
from smq.records import NewRecord, encode_batch
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

Smq = Callable[..., Result]


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_life_of_a_topic(smq: Smq) -> None:
    assert lines(smq("topic", "create", "u", "--partitions", 2)) == ["created topic u with 2 partitions"]
    assert lines(smq("topic", "create", "u", "--if-not-exists")) == ["topic u already exists"]
    assert [t["name"] for t in json.loads(smq("topic", "list", "--json").stdout)] == ["t", "u"]
    assert any("32-63" in line for line in lines(smq("topic", "describe", "u")))
    assert lines(smq("topic", "alter", "u", "--set", "a=b", "--partitions", 4)) == ["changed topic u"]
    assert len(json.loads(smq("topic", "describe", "u", "--json").stdout)["partitions"]) == 4
    assert lines(smq("topic", "delete", "u")) == ["deleted topic u"]
    assert smq("topic", "describe", "u").exit_code == 1


def test_addresses_and_settings_of_a_topic_have_either_name(cluster: FakeCluster) -> None:
    address = cluster.nodes[1].address
    for at, option in (("--servers", "--set"), ("--bootstrap", "--config")):
        for command in ("create", "alter"):
            arguments = ["topic", command, option[2:], option, "retention.ms=7", at, address, "--json"]
            (answer,) = lines(CliRunner().invoke(cli, arguments))
        assert json.loads(answer)["set"] == {"retention.ms": "7"}


def test_groups_are_listed_described_with_lag_and_deleted_without_members(cluster: FakeCluster, smq: Smq) -> None:
    assert lines(smq("group", "list"))[0].startswith("there are no groups")
    summary = pb.GroupSummary(group="g", state="Stable", protocol_type="consumer", members=1, generation=3)
    member = pb.GroupMemberInfo(member_id="m", client_id="c", partitions=[pb.TopicPartition(topic="t", partition=0)])
    offsets = [
        pb.GroupOffset(topic="t", partition=0, offset=1_000, hwm=3_500, lag=2_500),
        pb.GroupOffset(topic="t", partition=1, hwm=7, lag=7),
    ]
    found = pb.DescribeGroupResponse(group=summary, protocol="range", coordinator=2, members=[member], offsets=offsets)
    cluster.groups["g"] = found
    assert [g["name"] for g in json.loads(smq("group", "list", "--json").stdout)] == ["g"]
    printed = lines(smq("group", "describe", "g"))
    assert printed[0] == "g: Stable, generation 3, assignor range, coordinated by node 2; lag 2,507"
    assert any(line.split() == ["t", "1", "-", "7", "7", "-", "0", "B", "0", "s", "-"] for line in printed)
    assert json.loads(smq("group", "describe", "g", "--json").stdout)["lag"] == 2_507
    assert "GROUP_NOT_EMPTY" in smq("group", "delete", "g").stderr
    del found.members[:]
    assert lines(smq("group", "delete", "g")) == ["deleted group g"]
    unknown = smq("group", "describe", "g").stderr
    assert "UNKNOWN_GROUP" in unknown
    assert "`smq group list`" in unknown


def test_settings_of_the_cluster_are_shown_set_and_reset(smq: Smq) -> None:
    def values() -> dict[str, str]:
        return {s["key"]: s["value"] for s in json.loads(smq("config", "list", "--json").stdout) if s["is_set"]}

    assert values() == {}
    assert lines(smq("config", "set", "num.partitions=4", "offsets.retention.minutes=10")) == [
        "set num.partitions, offsets.retention.minutes"
    ]
    assert values() == {"num.partitions": "4", "offsets.retention.minutes": "10"}
    assert "the cluster" in smq("config", "list").stdout
    assert lines(smq("config", "unset", "num.partitions")) == ["reset num.partitions"]
    assert values() == {"offsets.retention.minutes": "10"}
    assert "write KEY=VALUE" in smq("config", "set", "num.partitions").stderr


def test_lines_go_in_and_come_out(smq: Smq, tmp_path: Path) -> None:
    source = tmp_path / "input.txt"
    source.write_bytes(b"one\ntwo\r\n\nlast without an end")
    assert "stored 4 records in t" in smq("produce", "t", source, "--partition", 1).stderr
    assert lines(smq("consume", "t")) == ["one", "two", "", "last without an end"]


def test_csv_is_keyed_by_its_column(smq: Smq, tmp_path: Path) -> None:
    source = tmp_path / "flights.csv"
    source.write_text('\ufeffcarrier,note\nAA,"a, b"\nBB,"two\nlines"\n')
    assert smq("produce", "t", source, "--key-column", "carrier").exit_code == 0
    found = {r["key"]: json.loads(r["value"]) for r in map(json.loads, lines(smq("consume", "t", "--json")))}
    assert found == {"AA": {"carrier": "AA", "note": "a, b"}, "BB": {"carrier": "BB", "note": "two\nlines"}}


def test_jsonl_is_kept_as_it_is_written(smq: Smq, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"id": 1,  "k": "a"}\n\n{"id": 2, "k": 7}\n')
    assert smq("produce", "t", source, "--key-column", "k").exit_code == 0
    rows = sorted((json.loads(line) for line in lines(smq("consume", "t", "--json"))), key=lambda r: str(r["value"]))
    assert [(r["key"], r["value"]) for r in rows] == [("a", '{"id": 1,  "k": "a"}'), ("7", '{"id": 2, "k": 7}')]


def test_what_consume_writes_produce_reads_back(smq: Smq, tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    record = {"value_base64": "/w==", "key": None, "headers": [{"key": "h", "value": "v"}], "timestamp_ms": 77}
    source.write_text(json.dumps(record) + "\n")
    assert smq("produce", "t", source, "--format", "records", "--partition", 0).exit_code == 0
    [written] = lines(smq("consume", "t", "--json"))
    source.write_text(written + "\n")
    assert smq("produce", "t", source, "--format", "records", "--partition", 0).exit_code == 0
    first, second = map(json.loads, lines(smq("consume", "t", "--json")))
    for row in (first, second):
        assert (row["value_base64"], row["key"], row["timestamp_ms"]) == ("/w==", None, 77)
        assert row["headers"] == [{"key": "h", "value": "v"}]


@pytest.mark.parametrize(
    ("name", "text", "options", "expected"),
    [
        ("a.jsonl", '{"k": 1}\nnot json\n', (), "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"k": 1}\n{"x": 1}\n', ("--key-column", "k"), "line 2: there is no field 'k'"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", (), "line 3: the row has 3 fields"),
        ("a.csv", "a,b\n1,2\n", ("--key-column", "c"), "no column 'c' for the key; there are a, b"),
        ("a.txt", "x\n", ("--key-column", "c"), "--key-column needs --format jsonl or csv"),
        ("a.txt", "{}\n", ("--format", "records"), 'line 1: a record is an object with "value"'),
    ],
)
def test_line_that_is_wrong_is_named_and_what_was_before_it_is_counted(
    smq: Smq, tmp_path: Path, name: str, text: str, options: tuple[str, ...], expected: str
) -> None:
    source = tmp_path / name
    source.write_text(text)
    result = smq("produce", "t", source, *options)
    assert result.exit_code == 1
    assert expected in result.stderr
    stored = len(lines(smq("consume", "t")))
    assert f"; stored {stored} record{'' if stored == 1 else 's'} in t" in result.stderr


def test_empty_input_stores_nothing_and_needs_its_topic(smq: Smq, tmp_path: Path) -> None:
    for name in ("empty.txt", "empty.csv", "empty.jsonl"):
        (tmp_path / name).touch()
        assert "stored 0 records in t" in smq("produce", "t", tmp_path / name).stderr
        refused = smq("produce", "nope", tmp_path / name)
        assert (refused.exit_code, "UNKNOWN_TOPIC" in refused.stderr) == (1, True)


def test_one_thing_is_printed_in_the_singular(smq: Smq, tmp_path: Path) -> None:
    assert "topics" not in lines(smq("status"))[-1]
    assert lines(smq("topic", "create", "u"))[0].endswith(" 1 partition")
    assert lines(smq("topic", "describe", "u"))[0].startswith("u: 1 partition, 3 replicas, ")
    source = tmp_path / "one.txt"
    source.write_text("1\n")
    assert "stored 1 record in u" in smq("produce", "u", source).stderr


def numbered(smq: Smq, tmp_path: Path, count: int) -> None:
    source = tmp_path / "numbers.txt"
    source.write_text("".join(f"{i}\n" for i in range(count)))
    assert smq("produce", "t", source, "--partition", 0).exit_code == 0


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (("--offset-type", "RESET_TO_EARLIEST"), 0),
        (("--offset-type", "exact_offset", "--offset-value", "4"), 4),
        (("--offset-type", "RESET_TO_OFFSET", "--offset-value", "7"), 7),
        (("--offset-type", "RESET_TO_OFFSET", "--offset-value", "-3"), 0),
        (("--offset-type", "RESUME_OR_EARLIEST", "--group", "g"), 0),
    ],
)
def test_reading_starts_at_the_position_of_the_offset_type(
    smq: Smq, tmp_path: Path, options: tuple[str, ...], first: int
) -> None:
    numbered(smq, tmp_path, 10)
    assert lines(smq("consume", "t", "--partition", 0, *options)) == [str(i) for i in range(first, 10)]


def test_offset_out_of_range_prints_where_reading_starts_instead(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 10)
    reset = ("consume", "t", "--partition", 0, "--offset-type", "RESET_TO_OFFSET", "--offset-value")
    assert smq(*reset, 99).stderr == "t/0: offset 99 is out of range, reading from 10\n"
    assert smq(*reset, -1).stderr == "t/0: offset -1 is out of range, reading from 0\n"
    assert [smq(*reset, offset).stderr for offset in (0, 10)] == ["", ""]


@pytest.mark.parametrize(
    "kind", [("RESET_TO_LATEST",), ("EXACT_TS_NS", "--offset-value", "1000"), ("RESUME_OR_LATEST", "--group", "g")]
)
def test_reading_from_the_end_ends_immediately(smq: Smq, tmp_path: Path, kind: tuple[str, ...]) -> None:
    numbered(smq, tmp_path, 3)
    assert lines(smq("consume", "t", "--partition", 0, "--offset-type", *kind)) == []


def test_group_is_committed_after_the_last_record_written(smq: Smq, tmp_path: Path, cluster: FakeCluster) -> None:
    numbered(smq, tmp_path, 10)
    resume = ("consume", "t", "--partition", 0, "--group", "g", "--commit")
    assert lines(smq(*resume, "--max-records", 4)) == ["0", "1", "2", "3"]
    assert cluster.commits["g", "t", 0][0] == 4
    assert lines(smq("consume", "t", "--partition", 0, "--group", "g", "--max-records", 1)) == ["4"]
    assert lines(smq(*resume)) == ["4", "5", "6", "7", "8", "9"]
    assert lines(smq(*resume)) == []


def test_deleted_records_are_gone(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 10)
    trim = ("topic", "trim", "t", "--partition", 0, "--offset", 10)
    assert lines(smq(*trim, "--dry-run"))[-1] == "10 offsets would be deleted from t"
    assert len(lines(smq("consume", "t", "--partition", 0))) == 10
    assert lines(smq(*trim))[-1] == "deleted 10 offsets from t"
    assert lines(smq("consume", "t", "--partition", 0)) == []


@pytest.mark.parametrize(("before", "kept"), [("12h", ["new"]), ("2026-01-01T12:00Z", ["old", "new"]), ("0s", [])])
def test_records_before_a_time_are_deleted(
    smq: Smq, tmp_path: Path, cluster: FakeCluster, before: str, kept: list[str]
) -> None:
    now_ms, day_ms = int(time.time() * 1_000), 86_400_000
    log = cluster.partition("t", 1)
    for value, created_ms in ((b"old", now_ms - day_ms), (b"new", now_ms - 1_000)):
        log.append(encode_batch([NewRecord(None, value, created_ms)]))
    log.settle()
    trim = ("topic", "trim", "t", "--before", before)
    assert (
        lines(smq(*trim, "--dry-run"))[-1] == f"{2 - len(kept)} offset{'s' * (len(kept) != 1)} would be deleted from t"
    )
    smq(*trim)
    assert lines(smq("consume", "t", "--partition", 1)) == kept


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ((), "pass either --before or --offset"),
        (("--before", "1d", "--offset", "3"), "pass either --before or --offset"),
        (("--offset", "-2"), "-2 is not in the range"),
        (("--before", "soon"), "write an age (30m, 12h, 7d) or 2026-01-31T12:00Z"),
        (("--before", "999999999d"), "write an age (30m, 12h, 7d) or 2026-01-31T12:00Z"),
    ],
)
def test_trim_needs_one_limit_that_can_be_read(smq: Smq, options: tuple[str, ...], advice: str) -> None:
    result = smq("topic", "trim", "t", *options)
    assert result.exit_code == 2
    assert advice in result.stderr


def test_trim_beyond_the_end_of_one_partition_deletes_from_none(smq: Smq, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 10)
    result = smq("topic", "trim", "t", "--offset", 4)
    assert (result.exit_code, result.stderr) == (1, "smq: t/1 ends at 0: it cannot begin at 4\n")
    assert len(lines(smq("consume", "t", "--partition", 0))) == 10


def test_status_shows_the_nodes(smq: Smq) -> None:
    assert any("ready" in line for line in lines(smq("status")))
    printed = json.loads(smq("status", "--json").stdout)
    assert (printed["is_well"], printed["nodes"][0]["status"]["node"]) == (True, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("consume", "nope"), "no topic 'nope'"),
        (("consume", "t", "--partition", "9"), "UNKNOWN_PARTITION"),
        (("consume", "t", "--partition", "0", "--offset-type", "EXACT_OFFSET", "--offset-value", "5"), "OUT_OF_RANGE"),
        (("topic", "create", "t"), "TOPIC_EXISTS"),
        (("topic", "delete", "nope"), "UNKNOWN_TOPIC"),
        (("consume", "t", "--from-replica", "7"), "no such node"),
        (("status", "--bootstrap", "nowhere"), "write host:port"),
    ],
)
def test_failure_is_one_sentence_and_exit_code_1(smq: Smq, arguments: tuple[str, ...], expected: str) -> None:
    result = smq(*arguments)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert result.stderr.startswith("smq: ")
    assert len(result.stderr.splitlines()) == 1


OVER_INT32, OVER_INT64 = str(1 << 31), str(1 << 63)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("topic", "create", "u", "--partitions", OVER_INT32), "partition_count"),
        (("topic", "create", "u", "--replication-factor", OVER_INT32), "replication_factor"),
        (("topic", "create", "u", "--start-offset", OVER_INT64), "start_offset"),
        (("topic", "alter", "t", "--partitions", OVER_INT32), "partition_count"),
        (("topic", "export", "t", "--output", "never-made.jsonl", "--partition", OVER_INT32), "partition"),
        (("topic", "trim", "t", "--partition", OVER_INT32, "--offset", "1"), "partition"),
        (("consume", "t", "--partition", OVER_INT32), "partition"),
        (("consume", "t", "--offset-type", "EXACT_TS_NS", "--offset-value", OVER_INT64), "EXACT_TS_NS"),
        (("node", "drain", OVER_INT32), "node"),
        (("offsets", "assign", "t", OVER_INT32), "partition"),
        (("offsets", "assign", "t", "0", "--count", OVER_INT64), "count"),
        (("offsets", "advance", "t", "0", OVER_INT64), "offset"),
    ],
)
def test_number_that_no_request_can_hold_is_refused_with_the_range(
    smq: Smq, arguments: tuple[str, ...], field: str
) -> None:
    result = smq(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("smq: INVALID_REQUEST: ")
    assert field in result.stderr
    limit = int(OVER_INT32 if OVER_INT32 in arguments else OVER_INT64)
    assert re.search(rf"is out of range: -?[0-9]+ to {limit - 1}\n$", result.stderr)


def test_name_that_is_no_text_is_refused(smq: Smq) -> None:
    for arguments in (("topic", "create", "\udcff"), ("consume", "\udcff"), ("group", "describe", "\udcff")):
        assert " '\\udcff' is no text in UTF-8\n" in smq(*arguments).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("consume", "t", "--offset-value", "5"),
        ("consume", "t", "--offset-type", "EXACT_OFFSET"),
        ("consume", "t", "--offset-type", "RESET_TO_LATEST", "--offset-value", "5"),
        ("consume", "t", "--offset-type", "RESUME_OR_LATEST"),
        ("consume", "t", "--offset-type", "NEWEST"),
        ("consume", "t", "--commit"),
        ("consume", "t", "--max-records", "0"),
        ("topic", "alter", "t"),
        ("topic", "create", "u", "--config", "broken"),
        ("topic", "create", "u", "--replication-factor", "0"),
        ("produce", "t", "no-such-file.txt"),
    ],
)
def test_command_that_makes_no_sense_is_a_usage_error(smq: Smq, arguments: tuple[str, ...]) -> None:
    result = smq(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_no_node_at_the_address_is_reported_with_advice() -> None:
    result = CliRunner().invoke(cli, ["topic", "list", "--bootstrap", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no node answers at 127.0.0.1:1: start one with `smq dev`, or name the gRPC port" in result.stderr


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (lambda asked: b"HTTP/1.1 404 Not Found\r\n\r\n" if asked.startswith(b"GET") else b"", "is an HTTP port"),
        (lambda asked: b"\0\0\0\6\0\0\0\1\0\0" if asked.startswith(b"\0") else b"", "is a Kafka port"),
        (lambda asked: b"220 mail\r\n", "start one with `smq dev`"),
    ],
)
def test_a_port_of_another_kind_is_recognised(answers: Callable[[bytes], bytes], says: str) -> None:
    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(answers(self.request.recv(1024)))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        result = CliRunner().invoke(cli, ["topic", "list", "--bootstrap", address])
        server.shutdown()
    assert result.exit_code == 1
    assert f"no node answers at {address}: " in result.stderr
    assert says in result.stderr


def test_no_node_over_tls_names_the_files_that_are_missing(tmp_path: Path) -> None:
    make_authority(tmp_path, "ours")
    own, clean = make_client(tmp_path, "admin"), dict.fromkeys((CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE))
    options = ("topic", "list", "--bootstrap", "127.0.0.1:1", "--tls-ca", str(own.ca))
    printed = CliRunner(env=clean).invoke(cli, options).stderr
    assert "--tls-ca belongs to" in printed
    wrong = CliRunner(env=clean).invoke(cli, [*options[:-1], os.devnull]).stderr
    assert f"{os.devnull} does not hold a CA's certificate in PEM" in wrong
    assert "--tls-certificate FILE and --tls-key FILE" in printed
    with_own = (*options, "--tls-certificate", str(own.certificate), "--tls-key", str(own.key))
    assert "FILE" not in CliRunner(env=clean).invoke(cli, with_own).stderr


def _process(cluster: FakeCluster, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "smq.coordinator.cli.main", *arguments, "--bootstrap", cluster.nodes[1].address]


def test_standard_input_is_sent_as_it_comes(cluster: FakeCluster) -> None:
    command = _process(cluster, "produce", "t", "--partition", "0")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"first\n")
        child.stdin.flush()
        reader = subprocess.run(
            _process(cluster, "consume", "t", "--partition", "0", "--follow", "--max-records", "1"),
            capture_output=True,
            timeout=120,
            check=True,
        )
        assert reader.stdout == b"first\n"
        _, printed = child.communicate(b"second\n", timeout=120)
    assert b"stored 2 records in t" in printed


def _hold(cluster: FakeCluster, is_held: bool) -> None:
    log = cluster.topics["t"][0]
    log.is_held = is_held
    log.settle()


def _lead_elsewhere(cluster: FakeCluster, is_elsewhere: bool) -> None:
    cluster.topics["t"][0].leader = 2 if is_elsewhere else 1  # node 2 is down


@pytest.mark.parametrize(
    ("hinder", "says"),
    [
        (_hold, "waiting for the node at {address} to acknowledge records of t/0\n"),
        (_lead_elsewhere, "waiting for a leader of t/0"),
    ],
)
def test_produce_says_what_it_waits_for_and_when_it_goes_on(
    hinder: Callable[[FakeCluster, bool], None], says: str
) -> None:
    with cluster_in_thread(2, t=1) as cluster:

        async def set_hindered(is_hindered: bool) -> None:
            hinder(cluster, is_hindered)

        cluster.call(cluster.nodes[2].stop())
        cluster.call(set_hindered(True))
        command = _process(cluster, "produce", "t", "--partition", "0")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stderr is not None
            child.stdin.write("first\n")
            child.stdin.close()
            assert child.stderr.readline().startswith(says.format(address=cluster.nodes[1].address))
            cluster.call(set_hindered(False))
            said = child.stderr.read().splitlines()
            assert child.wait(120) == 0
    assert said[-2].startswith("going on after ")
    assert said[-1] == "stored 1 record in t"


def test_produce_says_that_no_node_answers_before_it_gives_up(tmp_path: Path) -> None:
    source = tmp_path / "input.txt"
    source.write_text("x\n")
    done = CliRunner().invoke(cli, ["produce", "t", str(source), "--bootstrap", "127.0.0.1:1"])
    said = done.stderr.splitlines()
    assert done.exit_code == 1
    assert said[0] == "waiting for a node of the cluster at 127.0.0.1:1"
    assert said[-1].startswith("smq: no node answers at 127.0.0.1:1")


def test_reader_that_has_seen_enough_is_no_error(smq: Smq, cluster: FakeCluster, tmp_path: Path) -> None:
    numbered(smq, tmp_path, 50_000)
    command = " ".join(_process(cluster, "consume", "t")) + " | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=120, check=True)
    assert done.stdout == b"0\n"
    assert done.stderr == b""


def test_offsets_are_assigned_once_for_a_request_id_and_the_mark_follows(smq: Smq) -> None:
    assert lines(smq("offsets", "assign", "t", 0, "--count", 5)) == ["0 4"]
    again = ("offsets", "assign", "t", 0, "--request-id", "ab" * 16)
    assert lines(smq(*again)) == lines(smq(*again)) == ["5 5"]
    assert lines(smq("offsets", "advance", "t", 0, 6)) == ["6"]
    beyond = smq("offsets", "advance", "t", 0, 7)
    assert beyond.exit_code == 1
    assert "the message names" in beyond.stderr, "other details of an error are not shown"


def test_request_id_that_is_none_is_refused_saying_what_it_is(smq: Smq) -> None:
    refused = smq("offsets", "assign", "t", 0, "--request-id", "xyz")
    assert (refused.exit_code, "a request id is 32 hex digits" in refused.output) == (2, True)


def test_node_is_drained_and_undrained(cluster: FakeCluster, smq: Smq) -> None:
    assert "is being drained" in lines(smq("node", "drain", 1, "--no-wait"))[0]
    assert cluster.drained == {1}
    assert [row["drained"] for row in json.loads(smq("node", "list", "--json").stdout)] == [True]
    assert any("drained" in line for line in lines(smq("node", "list")))
    assert "no other node can lead" in lines(smq("node", "drain", 1))[0], "there is no other node"
    assert lines(smq("node", "undrain", 1)) == ["node 1 is in service"]
    assert cluster.drained == set()


def test_ring_slots_are_explained_where_they_are_shown(smq: Smq) -> None:
    told = " ".join(smq("topic", "describe", "--help").stdout.split())
    assert f"a ring of {RING_SLOTS_PER_PARTITION} slots for each partition" in told
    partitions = json.loads(smq("topic", "describe", "t", "--json").stdout)["partitions"]
    last = lines(smq("topic", "describe", "t"))[-1]
    start, stop = ring_range(PartitionIndex(len(partitions) - 1))
    assert last.endswith(f"{start}-{stop - 1}")
