"""`smq group list` and `describe`: figures, thresholds and exit codes."""

import json
from collections.abc import Callable
from copy import deepcopy

import pytest
from click.testing import Result

from smq.clients.types import GroupPosition
from smq.coordinator.cli.groups.lag_limit import EXIT_ABOVE, parse_threshold
from smq.coordinator.operators.formats import age_text, size_text
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import FakeCluster

Smq = Callable[..., Result]
MIB = 1 << 20


def position(**fields: int | None) -> GroupPosition:
    known = {"lag": 0, "lag_bytes": 0, "lag_ms": 0, "offset": 0, **fields}
    return GroupPosition(topic="t", partition=0, log_start=0, hwm=9, committed_ms=0, metadata="", **known)  # type: ignore[arg-type]  # the figures


@pytest.mark.parametrize(
    ("text", "figure", "limit"),
    [
        ("0", "lag", 0),
        ("1000", "lag", 1_000),
        ("10MiB", "lag_bytes", 10 * MIB),
        ("500kB", "lag_bytes", 500_000),
        ("7B", "lag_bytes", 7),
        ("250ms", "lag_ms", 250),
        ("30s", "lag_ms", 30_000),
        ("5m", "lag_ms", 300_000),
        ("2h", "lag_ms", 7_200_000),
        ("30d", "lag_ms", 2_592_000_000),
    ],
)
def test_a_limit_is_of_records_bytes_or_time_and_equal_is_not_above(text: str, figure: str, limit: int) -> None:
    threshold = parse_threshold(text)
    assert not threshold.above([position(**{figure: limit})])
    assert threshold.above([position(**{figure: limit + 1})])
    assert not threshold.above([position(**{figure: None})])
    assert threshold.unknown([position(**{figure: None})])
    assert threshold.unknown([position(**{figure: None, "offset": None})]), "committed or not"
    assert threshold.above([position(**{figure: limit + 1, "offset": None})]), "committed or not"


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "5 minutes", "10 X", "1e3", "٣"])
def test_a_limit_that_is_written_otherwise_is_refused_with_the_notation(text: str) -> None:
    with pytest.raises(ValueError, match="10MiB"):
        parse_threshold(text)


def test_sizes_and_ages_read_well() -> None:
    assert [size_text(n) for n in (None, 0, 1_023, 1_024, 5 * MIB, 1 << 50)] == [
        "-", "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "1024.0 TiB",
    ]  # fmt: skip
    ages = (None, 0, 7, 12_000, 200_000, 18_600_000, 2_599_200_000)
    assert [age_text(ms) for ms in ages] == ["-", "0 s", "7 ms", "12 s", "3 m 20 s", "5 h 10 m", "30 d 2 h"]


def rows(result: Result) -> list[list[str]]:
    return [line.split("  ") for line in result.stdout.splitlines()]


def cells(result: Result) -> list[list[str]]:
    return [[cell.strip() for cell in row if cell.strip()] for row in rows(result)]


def test_describe_shows_the_lag_of_partitions_and_members(smq: Smq) -> None:
    shown = cells(smq("group", "describe", "g"))
    assert ["t", "0", "5", "9", "4", "4", "2.0 KiB", "1 m 30 s", "m"] in shown
    assert any(row[0] == "m" and row[-4:] == ["4", "4", "2.0 KiB", "1 m 30 s"] for row in shown)
    document = json.loads(smq("group", "describe", "g", "--json").stdout)
    assert (document["lag"], document["lag_bytes"], document["lag_ms"]) == (4, 2_048, 90_000)
    (member,) = document["members"]
    figures = (member["member_id"], member["lag"], member["lag_records"], member["lag_bytes"], member["lag_ms"])
    assert figures == ("m", 4, 4, 2_048, 90_000)


@pytest.mark.usefixtures("without_leader")
@pytest.mark.parametrize(
    ("command", "begin"),
    [
        (("describe", "g"), "g: "),
        (("describe", "g"), "m "),
        (("list", "--lag"), "g "),
        (("watch", "g", "--count", "1"), ""),
    ],
    ids=["headline", "member", "list", "watch"],
)
def test_a_total_of_which_a_part_is_not_known_says_or_more(smq: Smq, command: tuple[str, ...], begin: str) -> None:
    lines = [line for line in smq("group", *command).stdout.splitlines() if line.startswith(begin)]
    assert "4 or more" in lines[0]


@pytest.mark.usefixtures("without_leader")
def test_a_total_of_which_a_part_is_not_known_is_null_in_json(smq: Smq) -> None:
    described = json.loads(smq("group", "describe", "g", "--json").stdout)
    (listed,) = json.loads(smq("group", "list", "--lag", "--json").stdout)
    watched = json.loads(smq("group", "watch", "g", "--json", "--count", "1").stdout)
    for found in (described, listed, watched, *described["members"]):
        assert (found["lag"], found["lag_records"], found["lag_bytes"], found["lag_ms"]) == (None,) * 4
        assert found["lag_at_least"] == 4


def test_a_commit_beyond_the_end_is_not_told_as_a_lag_of_0(smq: Smq, cluster: FakeCluster) -> None:
    cluster.groups["g"].offsets[1].offset = 1_000_000_003
    assert ["t", "1", "1,000,000,003", "3", "1,000,000,000 beyond the end", "0", "0 B", "0 s", "-"] in cells(
        smq("group", "describe", "g")
    )


def test_list_shows_the_lag_of_each_group_if_asked(smq: Smq) -> None:
    assert ["g", "Stable", "1", "1", "consumer", "4", "2.0 KiB", "1 m 30 s"] in cells(smq("group", "list", "--lag"))
    assert ["g", "Stable", "1", "1", "consumer"] in cells(smq("group", "list"))
    (row,) = json.loads(smq("group", "list", "--lag", "--json").stdout)
    assert (row["name"], row["lag"], row["lag_ms"]) == ("g", 4, 90_000)


def test_a_group_that_goes_while_the_others_are_asked_is_left_out(smq: Smq, cluster: FakeCluster) -> None:
    def gone(name: str, _request: object) -> None:
        if name == "DescribeGroup":
            raise SmqError(ErrorCode.UNKNOWN_GROUP, "deleted meanwhile")

    for node in cluster.nodes.values():
        node.hook = gone
    result = smq("group", "list", "--lag", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])


@pytest.mark.parametrize(
    ("limit", "code"), [("4", 0), ("3", EXIT_ABOVE), ("2KiB", 0), ("2047B", EXIT_ABOVE), ("89s", EXIT_ABOVE)]
)
@pytest.mark.parametrize("command", [("describe", "g"), ("list",), ("watch", "g", "--count", "1")])
def test_fail_above_ends_with_its_own_code_and_says_where(
    smq: Smq, command: tuple[str, ...], limit: str, code: int
) -> None:
    result = smq("group", *command, "--fail-above", limit)
    assert result.exit_code == code
    assert ("t/0" in result.stderr) == bool(code)


def test_fail_above_fails_if_the_lag_is_not_known(smq: Smq, cluster: FakeCluster) -> None:
    cluster.groups["g"].offsets.add(topic="t", partition=1, offset=3, hwm=3, end_unknown=True)
    del cluster.groups["g"].offsets[1]
    result = smq("group", "describe", "g", "--fail-above", "100")
    assert result.exit_code == 1
    assert "`smq status`" in result.stderr


@pytest.mark.parametrize("limit", ["999999999", "10MiB", "1d"])
def test_fail_above_counts_an_assigned_partition_without_a_commit_from_the_log_start(
    smq: Smq, cluster: FakeCluster, limit: str
) -> None:
    figures = {"lag": 10**9, "lag_records": 10**9, "lag_bytes": 1 << 40, "lag_ms": 30 * 86_400_000}
    cluster.groups["g"].offsets.add(topic="t", partition=2, hwm=10**9, **figures)
    result = smq("group", "describe", "g", "--fail-above", limit)
    assert result.exit_code == EXIT_ABOVE
    assert "behind in t/2" in result.stderr


@pytest.mark.usefixtures("without_leader")
def test_fail_above_looks_at_all_groups_and_above_is_said_before_unknown(smq: Smq, cluster: FakeCluster) -> None:
    for name, lag in (("h", 50), ("i", 60), ("j", 1)):
        cluster.groups[name] = deepcopy(cluster.groups["g"])
        cluster.groups[name].group.group = name
        del cluster.groups[name].offsets[1]
        cluster.groups[name].offsets[0].lag = lag
    result = smq("group", "list", "--fail-above", "40")
    assert result.exit_code == EXIT_ABOVE, "although the lag of g is not known"
    assert [name in result.stderr for name in ("group g", "group h", "group i", "group j")] == [
        False,
        True,
        True,
        False,
    ]
    assert smq("group", "list", "--fail-above", "100").exit_code == 1


def test_fail_above_that_cannot_be_read_is_a_usage_error(smq: Smq) -> None:
    result = smq("group", "describe", "g", "--fail-above", "lots")
    assert result.exit_code == 2
    assert "10MiB" in result.stderr
