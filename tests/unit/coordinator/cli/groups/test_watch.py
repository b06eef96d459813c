"""`smq group watch`: a line per look, and an incident that it survives."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from click.testing import Result

from smq.clients import Admin
from smq.clients.types import GroupDescription
from smq.coordinator.cli.groups import watch
from smq.coordinator.cli.groups.lag_limit import EXIT_ABOVE
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import FakeCluster

Smq = Callable[..., Result]
LOOK = ("group", "watch", "g", "--interval", "0.1")


def test_watch_prints_a_line_per_look_with_the_speed(smq: Smq) -> None:
    result = smq(*LOOK, "--count", "2")
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "g: Stable, lag 4 (2.0 KiB, 1 m 30 s)" in first
    assert "offsets/s" not in first
    assert "+0 offsets/s" in second


@pytest.fixture
def fail_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[ErrorCode | None]], None]:
    """`fail_in([None, ErrorCode.NO_QUORUM])`: the second look has no answer."""

    def prepare(codes: Iterable[ErrorCode | None]) -> None:
        left, real = iter(codes), Admin.describe_group

        async def scripted(self: Admin, name: str, **options: Any) -> GroupDescription:
            if (code := next(left)) is not None:
                raise SmqError(code, "no majority")
            return await real(self, name, **options)

        monkeypatch.setattr(Admin, "describe_group", scripted)

    return prepare


OUTAGE = (None, ErrorCode.NO_QUORUM, ErrorCode.UNREACHABLE, None, None)


def test_an_incident_is_shown_and_the_watch_goes_on_after_it(
    smq: Smq, fail_in: Callable[[Iterable[ErrorCode | None]], None]
) -> None:
    fail_in(OUTAGE)
    result = smq(*LOOK, "--count", "5", "--fail-above", "1000")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "g: not known (NO_QUORUM: no majority)" in lines[1]
    assert "g: not known (UNREACHABLE: no majority)" in lines[2]
    assert ["lag 4" in line for line in lines] == [True, False, False, True, True]
    assert ["offsets/s" in line for line in lines] == [False, False, False, False, True], "a speed needs two looks"


def test_with_json_a_look_without_an_answer_is_a_line_with_the_error(
    smq: Smq, fail_in: Callable[[Iterable[ErrorCode | None]], None]
) -> None:
    fail_in(OUTAGE)
    lines = [json.loads(line) for line in smq(*LOOK, "--count", "5", "--json").stdout.splitlines()]
    assert [line.get("lag") for line in lines] == [4, None, None, 4, 4]
    assert [line["error"]["code"] for line in lines[1:3]] == ["NO_QUORUM", "UNREACHABLE"]


def test_the_limit_is_checked_after_an_incident_as_before_it(
    smq: Smq, fail_in: Callable[[Iterable[ErrorCode | None]], None]
) -> None:
    fail_in(OUTAGE[1:])
    result = smq(*LOOK, "--fail-above", "3")
    assert result.exit_code == EXIT_ABOVE
    assert len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--fail-above", "1000"), 1)])
def test_a_node_that_goes_away_is_no_end_and_for_a_limit_an_error_in_the_last_look_only(
    smq: Smq, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(watch, "_ANSWER_MS", 300.0)
    node = cluster.nodes[1]

    def stop(name: str, request: Any) -> Any:
        return node.stop() if name == "DescribeGroup" and node.seen.count(name) == 2 else None

    node.hook = stop
    result = smq(*LOOK, "--count", "3", *options)
    assert result.exit_code == code, result.stderr
    assert ["not known" in line for line in result.stdout.splitlines()] == [False, True, True]


def test_a_group_that_is_deleted_meanwhile_ends_the_watch(
    smq: Smq, fail_in: Callable[[Iterable[ErrorCode | None]], None]
) -> None:
    fail_in((None, ErrorCode.UNKNOWN_GROUP))
    result = smq(*LOOK)
    assert result.exit_code == 1
    assert "UNKNOWN_GROUP" in result.stderr


def test_on_a_terminal_a_look_has_the_members_and_the_partitions(smq: Smq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    shown = smq(*LOOK, "--count", "1").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["m", "-", "-", "-", "0", "ms", "t", "0", "4", "4", "2.0", "KiB", "1", "m", "30", "s"] in rows
    assert ["t", "0", "5", "9", "4", "4", "2.0", "KiB", "1", "m", "30", "s", "m"] in rows
