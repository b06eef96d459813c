"""`smq consume`: where it starts and stops, what it writes, what it commits, and how it ends."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result

from smq.coordinator.cli.record_format import format_line
from smq.coordinator.user_errors import ConfigError
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.node_process import CLI

Smq = Callable[..., Result]
HOUR_MS = 3_600_000


def fill(cluster: FakeCluster, ages_h: list[int], *, partition: int = 0) -> None:
    """One record for each age, in hours, with its offset as its value."""
    now_ms = time.time_ns() // 1_000_000
    for age in ages_h:
        offset = cluster.topics["t"][partition].end
        record = NewRecord(b"k%d" % (offset % 2), b"%d" % offset, now_ms - age * HOUR_MS, [("n", b"%d" % offset)])
        cluster.append("t", partition, [record])


def written(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_it_starts_where_it_is_told_in_every_spelling(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, [5, 4, 3, 2, 1])
    day = (datetime.now(UTC) - timedelta(hours=2, minutes=30)).isoformat()
    for options, first in (
        (("-o", "earliest"), 0),
        (("-o", "2"), 2),
        (("-o", "-2"), 3),
        (("-o", "-99"), 0),
        (("-o", "latest"), 5),
        (("--offset-type", "earliest"), 0),
        (("--offset-type", "EXACT_OFFSET", "--offset-value", 4), 4),
        (("--since", "210m"), 2),
        (("--since", day), 3),
        (("--since", "1m"), 5),
    ):
        assert written(smq("consume", "t", "-p", 0, *options)) == [str(n) for n in range(first, 5)], options


def test_it_stops_before_a_time_and_after_a_number_of_records(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, [5, 4, 3, 2, 1])
    assert written(smq("consume", "t", "-p", 0, "--until", "150m")) == ["0", "1", "2"]
    assert written(smq("consume", "t", "-p", 0, "--since", "270m", "--until", "150m")) == ["1", "2"]
    assert written(smq("consume", "t", "-p", 0, "--until-time", "9h")) == []
    assert written(smq("consume", "t", "-p", 0, "-n", 2)) == ["0", "1"]


def test_it_stops_before_an_offset_and_at_the_present_end(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, [5, 4, 3, 2, 1])
    for end, expected in ((0, []), (3, ["0", "1", "2"]), (99, ["0", "1", "2", "3", "4"])):
        assert written(smq("consume", "t", "-p", 0, "--until-offset", end)) == expected
    assert written(smq("consume", "t", "-p", 0, "-o", 1, "--until-offset", 3)) == ["1", "2"]
    assert written(smq("consume", "t", "-p", 0, "-o", 3, "--until-offset", 3)) == []


@pytest.mark.parametrize(("offset", "ages", "end"), [(2, "150m", 2), (4, "150m", 3), (4, "9h", 0)])
def test_of_two_ends_the_lower_counts(cluster: FakeCluster, smq: Smq, offset: int, ages: str, end: int) -> None:
    fill(cluster, [5, 4, 3, 2, 1])
    options = ("--until-offset", offset, "--until-time", ages)
    assert written(smq("consume", "t", "-p", 0, *options)) == [str(n) for n in range(end)]


def test_only_records_with_the_key_and_the_headers_are_written_and_counted(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, [5, 4, 3, 2, 1])
    assert written(smq("consume", "t", "--key", "k1")) == ["1", "3"]
    assert written(smq("consume", "t", "--key", "k1", "-n", 1)) == ["1"]
    assert written(smq("consume", "t", "--header", "n=3")) == ["3"]
    assert written(smq("consume", "t", "--header", "n", "--key", "k0")) == ["0", "2", "4"]
    assert written(smq("consume", "t", "--header", "n=3", "--key", "k0")) == []
    smq("consume", "t", "-g", "g", "--commit", "--key", "k1", "-n", 1)
    assert cluster.commits["g", "t", 0][0] == 2, "what it passed over is done, too"


def test_a_format_names_the_parts_of_a_record(cluster: FakeCluster, smq: Smq) -> None:
    record = NewRecord(b"key", b"value", 1_767_268_800_123, [("a", b"1"), ("b", None)])
    cluster.append("t", 2, [record, NewRecord(None, None, 0)])
    first, second = written(smq("consume", "t", "--output", r"%t %p %o|%k|%v|%h|%T|%D|100%%\tx"))
    assert first == "t 2 0|key|value|a=1,b=|1767268800123|2026-01-01T12:00:00.123Z|100%\tx"
    assert second == "t 2 1||||0|1970-01-01T00:00:00.000Z|100%\tx"
    assert written(smq("consume", "t", "-n", 1, "--output", "%s")) == ["1"]
    no_dates = (1_767_268_800_123_000_000, 253_402_300_800_000, 2**63 - 1)
    cluster.append("t", 0, [NewRecord(None, b"v", when) for when in no_dates])
    assert written(smq("consume", "t", "-p", 0, "--output", "%D")) == [str(when) for when in no_dates]
    for wrong in ("%x", "100%"):
        with pytest.raises(ConfigError, match="means nothing: use %t"):
            format_line(wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--group", ""), "--group is empty"),
        (("--commit",), "--commit needs --group"),
        (("-o", "1", "--since", "1h"), "pass one of them"),
        (("-f", "--until", "1h"), "--until-time does"),
        (("-f", "--until-offset", "3"), "--until-offset does"),
        (("--json", "--output", "%v"), "pass one of them"),
        (("--output", "%x"), "means nothing"),
        (("-o", "newest"), "write earliest, latest, an offset"),
        (("--since", "yesterday"), "is no time"),
        (("--header", "=x"), "is no header"),
        (("--key", "a", "--key-prefix", "a"), "which keys"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_what_to_write(
    smq: Smq, options: tuple[str, ...], says: str
) -> None:
    refused = smq("consume", "t", *options)
    assert (refused.exit_code, says in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("options", "lines"), [((), ["0\n", "1\n", "2\n"]), (("--key", "k1"), ["1\n"])], ids=str)
def test_however_it_is_ended_it_has_committed_what_it_wrote_or_passed_over(
    cluster: FakeCluster, environment: dict[str, str], end: signal.Signals, options: tuple[str, ...], lines: list[str]
) -> None:
    fill(cluster, [3, 2, 1])
    command = [*CLI, "consume", "t", "-p", "0", "-f", "-g", "g", "--commit", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in lines] == lines
        child.send_signal(end)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (0, "")
    assert cluster.commits["g", "t", 0][0] == 3


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_twice_does_not_cut_its_commit_short(
    cluster: FakeCluster, environment: dict[str, str], end: signal.Signals, second: signal.Signals
) -> None:
    """As timeout(1) sends it: to the command, and to its process group. It was not committed, or hung for ever."""
    fill(cluster, [3, 2, 1])
    command = [*CLI, "consume", "t", "-p", "0", "-f", "-g", "g", "--commit"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None

        async def again(name: str, _request: object) -> None:
            if name == "CommitOffsets":
                child.send_signal(second)
                await asyncio.sleep(0.2)

        cluster.nodes[1].hook = again
        assert [child.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        child.send_signal(end)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (0, "")
    assert cluster.commits["g", "t", 0][0] == 3


def test_a_full_device_is_an_error_in_one_line(cluster: FakeCluster, environment: dict[str, str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    fill(cluster, [1])
    with Path("/dev/full").open("w") as full:
        for command in (["consume", "t"], ["topic", "list"], ["--help"], ["status", "--json"]):
            ended = subprocess.run(
                [*CLI, *command],
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
                timeout=60,
                check=False,
            )
            assert (ended.returncode, ended.stderr) == (
                1,
                "smq: the output cannot be written: No space left on device\n",
            ), command


@pytest.mark.parametrize(
    "command",
    ["consume t", "consume t --header n", "topic list", "topic list --json", "status", "--help", "topic --help"],
)
def test_a_reader_that_leaves_ends_every_command_quietly(
    cluster: FakeCluster, environment: dict[str, str], command: str
) -> None:
    fill(cluster, [1])
    shell = f"{' '.join(CLI)} {command} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", shell], stderr=subprocess.PIPE, env=environment, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_json_has_all_fields_and_a_bare_consume_the_values(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, [1])
    (line,) = written(smq("consume", "t", "--json"))
    found = json.loads(line)
    assert (found["offset"], found["key"], found["headers"]) == (0, "k0", [{"key": "n", "value": "0"}])
