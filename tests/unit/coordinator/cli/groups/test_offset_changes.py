"""`smq group reset-offsets`, `delete-offsets`, `export` and `import`: what they plan, refuse and do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.groups.offset_changes import parse_file
from smq.coordinator.cli.root import cli
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

Smq = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Topic t has the offsets 2 to 9 in partition 0, created at 1,000 s and a second apart, and none in partition 1."""
    with cluster_in_thread(1, t=2) as found:
        for n in range(10):
            found.append("t", 0, [NewRecord(None, b"v", 1_000_000 + n * 1_000)])
        found.partition("t", 0).log_start = 2
        commit(found, 5)
        yield found


def commit(cluster: FakeCluster, offset: int, metadata: str = "note") -> None:
    cluster.commits["g", "t", 0] = (offset, metadata)
    cluster.groups["g"] = pb.DescribeGroupResponse(
        group=pb.GroupSummary(group="g", state="Empty"),
        offsets=[
            pb.GroupOffset(topic="t", partition=0, offset=offset, hwm=10, lag=10 - offset, metadata=metadata),
            pb.GroupOffset(topic="t", partition=1, hwm=0),
        ],
    )


@pytest.fixture
def smq(cluster: FakeCluster) -> Smq:
    environment = {"SMQ_BOOTSTRAP": cluster.nodes[1].address}
    return lambda *arguments: CliRunner(env=environment).invoke(cli, ["group", *map(str, arguments)])


def changes(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return {f"{c['topic']}/{c['partition']}": (c["before"], c["after"], c["note"]) for c in document["changes"]}


@pytest.mark.parametrize(
    ("way", "after", "note"),
    [
        (("--to-earliest",), 2, ""),
        (("--to-latest",), 10, ""),
        (("--to-offset", 7), 7, ""),
        (("--to-offset", 0), 2, "0 is outside 2 to 10"),
        (("--to-offset", 99), 10, "99 is outside 2 to 10"),
        (("--shift-by", -2), 3, ""),
        (("--shift-by", 3), 8, ""),
        (("--shift-by", -99), 2, "0 is outside 2 to 10"),
        (("--shift-by", 99), 10, "104 is outside 2 to 10"),
        (("--to-time", "1970-01-01T00:16:46Z"), 6, ""),
    ],
)
def test_each_way_names_an_offset_within_the_partition(
    smq: Smq, cluster: FakeCluster, way: tuple[Any, ...], after: int, note: str
) -> None:
    planned = smq("reset-offsets", "g", "--topic", "t:0", *way, "--json")
    assert changes(planned) == {"t/0": (5, after, note)}
    assert json.loads(planned.stdout)["executed"] is False
    assert cluster.commits["g", "t", 0] == (5, "note"), "nothing changes without --execute"
    assert "commit" not in cluster.applied
    done = smq("reset-offsets", "g", "--all-topics", *way, "--json", "--execute")
    assert changes(done) == {"t/0": (5, after, note)}
    assert cluster.commits["g", "t", 0][0] == after


def test_a_plan_is_a_table_that_says_how_to_go_on(smq: Smq) -> None:
    shown = smq("reset-offsets", "g", "--topic", "t", "--to-earliest").stdout
    assert "2 offsets of g would change: pass --execute" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("t ")]
    assert rows == [["t", "0", "5", "2", "-3"], ["t", "1", "-", "0", "-"]]
    assert "changed 2 offsets of g" in smq("reset-offsets", "g", "--topic", "t", "--to-latest", "--execute").stdout


def test_a_new_group_can_begin_anywhere(smq: Smq, cluster: FakeCluster) -> None:
    result = smq("reset-offsets", "new", "--topic", "t:0", "--to-offset", 4, "--execute", "--json")
    assert changes(result) == {"t/0": (None, 4, "")}
    assert cluster.commits["new", "t", 0][0] == 4


@pytest.mark.parametrize("command", [("reset-offsets", "g", "--all-topics", "--to-earliest"), ("import", "g", "-")])
@pytest.mark.parametrize("execute", [(), ("--execute",)])
def test_an_active_group_is_refused_with_the_names_of_its_members(
    smq: Smq, cluster: FakeCluster, command: tuple[str, ...], execute: tuple[str, ...]
) -> None:
    for n in range(7):
        cluster.groups["g"].members.add(member_id=f"member-{n}", client_host="/10.0.0.1")
    result = smq(*command, *execute)
    assert result.exit_code == 1
    assert "member-0 (/10.0.0.1)" in result.stderr
    assert "and 2 more. Stop them first" in result.stderr
    assert cluster.commits["g", "t", 0] == (5, "note")


def test_a_member_that_joins_during_the_reset_wins(smq: Smq, cluster: FakeCluster) -> None:
    def join(name: str, request: Any) -> None:
        if name == "CommitOffsets":
            raise SmqError(ErrorCode.UNKNOWN_MEMBER, "group 'g' has 1 members: only they commit for it")

    cluster.nodes[1].hook = join
    result = smq("reset-offsets", "g", "--all-topics", "--to-earliest", "--execute")
    assert result.exit_code == 1
    assert "a member has joined group g meanwhile, and nothing was changed" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("reset-offsets", "g", "--topic", "t"), 2, "exactly one of"),
        (("reset-offsets", "g", "--topic", "t", "--to-latest", "--to-offset", 1), 2, "exactly one of"),
        (("reset-offsets", "g", "--to-latest"), 2, "either --topic, or --all-topics"),
        (("reset-offsets", "g", "--to-latest", "--topic", "t", "--all-topics"), 2, "either --topic, or --all-topics"),
        (("reset-offsets", "g", "--topic", "t", "--to-offset", -1), 2, "-1"),
        (("reset-offsets", "g", "--topic", "t", "--to-time", "soon"), 2, "is no time"),
        (("reset-offsets", "g", "--topic", "t:x", "--to-latest"), 1, "write TOPIC, or TOPIC:0,2"),
        (("reset-offsets", "g", "--topic", "t:0,5", "--to-latest"), 1, "the partitions 0 to 1, not 5"),
        (("reset-offsets", "g", "--topic", "nowhere", "--to-latest"), 1, "UNKNOWN_TOPIC"),
        (("reset-offsets", "g", "--topic", "t", "--shift-by", 1), 1, "nothing is committed for t/1"),
        (("reset-offsets", "unknown", "--all-topics", "--to-latest"), 1, "name topics with --topic"),
        (("delete-offsets", "unknown", "--all-topics"), 1, "UNKNOWN_GROUP"),
        (("delete-offsets", "g"), 2, "either --topic, or --all-topics"),
        (("export", "unknown"), 1, "UNKNOWN_GROUP"),
    ],
)
def test_what_makes_no_sense_is_refused_saying_what_to_write(
    smq: Smq, arguments: tuple[Any, ...], code: int, expected: str
) -> None:
    result = smq(*arguments)
    assert (result.exit_code, expected in result.stderr) == (code, True), result.stderr


def test_exported_offsets_are_imported_with_their_metadata_by_another_group(
    smq: Smq, cluster: FakeCluster, tmp_path: Path
) -> None:
    file = tmp_path / "offsets.json"
    assert smq("export", "g", "--output", file).exit_code == 0
    assert json.loads(file.read_text()) == json.loads(smq("export", "g").stdout)
    assert changes(smq("import", "copy", file, "--json")) == {"t/0": (None, 5, "")}
    assert ("copy", "t", 0) not in cluster.commits
    assert smq("import", "copy", file, "--execute").exit_code == 0
    assert cluster.commits["copy", "t", 0] == (5, "note")
    commit(cluster, 9)
    restored = smq("reset-offsets", "g", "--from-file", file, "--execute", "--json")
    assert changes(restored) == {"t/0": (9, 5, "")}
    refused = smq("reset-offsets", "g", "--from-file", file, "--topic", "t")
    assert (refused.exit_code, "leave --topic and --all-topics out" in refused.stderr) == (2, True)


def test_offsets_are_deleted_only_when_asked_and_where_something_is_committed(smq: Smq, cluster: FakeCluster) -> None:
    assert "1 offset of g would be deleted: pass --execute" in smq("delete-offsets", "g", "--topic", "t").stdout
    assert ("g", "t", 0) in cluster.commits
    assert "deleted 1 offset of g" in smq("delete-offsets", "g", "--topic", "t", "--execute").stdout
    assert ("g", "t", 0) not in cluster.commits


OFFSET = {"topic": "t", "partition": 0, "offset": 7}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", 'no list "offsets"'),
        ('{"offsets": 1}', 'no list "offsets"'),
        (json.dumps({"offsets": [OFFSET, 7]}), "offset 2 of the file"),
        (json.dumps({"offsets": [OFFSET | {"offset": -1}]}), "offset 1 of the file"),
        (json.dumps({"offsets": [OFFSET | {"offset": True}]}), "offset 1 of the file"),
        (json.dumps({"offsets": [OFFSET | {"offset": 1.5}]}), "offset 1 of the file"),
        (json.dumps({"offsets": [OFFSET | {"topic": None}]}), "offset 1 of the file"),
        (json.dumps({"offsets": [OFFSET | {"metadata": []}]}), "offset 1 of the file"),
        (json.dumps({"offsets": [OFFSET, OFFSET]}), "offset 2 of the file repeats t/0"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(text: str, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_file(text)
    assert expected in str(raised.value)


def test_a_file_without_offsets_or_text_changes_nothing(smq: Smq, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.json", tmp_path / "binary.json"
    empty.write_text('{"offsets": []}')
    binary.write_bytes(b"\xff\xfe")
    assert "has no offsets" in smq("import", "g", empty).stderr
    assert "is no text" in smq("import", "g", binary).stderr
