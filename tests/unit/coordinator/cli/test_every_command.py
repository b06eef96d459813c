"""What holds for every command: help with an example, --json, errors as JSON, and ends without a traceback."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli import root
from smq.coordinator.cli.parameters import MOMENT
from smq.coordinator.cli.root import SUMMARIES, cli
from smq.coordinator.cli.tables import Table
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.node_process import CLI

Smq = Callable[..., Result]
# They run until they are stopped, work on files without a cluster, or print what a shell or a person reads.
WITHOUT_JSON = {"dev", "cluster", "serve", "completion", "man", "top", "disk renew", "disk forget", "spark-shell"} | {
    *(f"cert {name}" for name in ("init", "node", "client", "show")),
    "group export",  # its output is JSON
}


def every_command() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    waiting: list[tuple[str, click.Command]] = []
    for name in cli.list_commands(context):
        found = cli.get_command(context, name)
        assert found is not None
        waiting.append((name, found))
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, click.Group):
            inner = [(sub, command.get_command(context, sub)) for sub in command.list_commands(context)]
            waiting += [(f"{name} {sub}", found) for sub, found in inner if found is not None]
        else:
            yield name, command


COMMANDS = dict(every_command())
PAGE = Path(__file__).parents[4] / "docs" / "cli.md"
SHELL_LINES = COMMANDS["completion"].help or ""  # its lines for a start-up file are its examples


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_json_and_an_example(name: str) -> None:
    command = COMMANDS[name]
    assert any("--json" in p.opts for p in command.params) is (name not in WITHOUT_JSON)
    told = (command.help or "").partition("Example")[2] or SHELL_LINES
    examples = re.findall(rf"smq {name}(?![-\w])([^|<;\n)]*)", told)
    assert examples, name
    for words in map(shlex.split, examples):
        command.make_parser(click.Context(command)).parse_args(words)  # an option that is none raises


def documented() -> dict[str, set[str]]:
    """Command -> the fields that docs/cli.md names."""
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", text)) for names, text in rows for name in re.findall(r"`(.*?)`", names)}


def test_the_page_names_the_document_of_every_command_with_json() -> None:
    assert COMMANDS.keys() - WITHOUT_JSON - documented().keys() == set()


def test_summaries_are_those_of_the_commands_and_are_not_cut() -> None:
    context = click.Context(cli)
    for name, summary in SUMMARIES.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert summary == command.get_short_help_str(200)
    assert root._MODULES.keys() == SUMMARIES.keys()
    for help_text in (CliRunner().invoke(cli, ["--help"]).stdout, CliRunner().invoke(cli, ["topic", "--help"]).stdout):
        assert "..." not in help_text.replace("[ARGS]...", "")


def test_changes_are_reported_as_json(smq: Smq) -> None:
    for arguments, expected in (
        (("topic", "create", "u"), {"topic": "u", "created": True}),
        (("topic", "create", "u", "--if-not-exists"), {"topic": "u", "created": False}),
        (("topic", "alter", "u", "--set", "a=b"), {"topic": "u", "set": {"a": "b"}, "unset": [], "partitions": None}),
        (("topic", "delete", "u"), {"topic": "u", "deleted": True}),
        (("offsets", "assign", "t", 0, "--count", 2), {"base_offset": 0, "last_offset": 1}),
        (("offsets", "advance", "t", 0, 2), {"hwm": 2}),
        (("config", "set", "a=1"), {"set": {"a": "1"}}),
        (("config", "unset", "a"), {"unset": ["a"]}),
        (("node", "undrain", 1), {"node": 1, "drained": False}),
    ):
        assert json.loads(smq(*arguments, "--json").stdout) == expected
        assert expected.keys() <= documented()[" ".join(map(str, arguments[:2]))]


def test_errors_are_json_too(smq: Smq) -> None:
    for arguments, code in (
        (("topic", "describe", "nope", "--json"), "UNKNOWN_TOPIC"),
        (("group", "describe", "nope", "--json"), "UNKNOWN_GROUP"),
        (("consume", "t", "--commit", "--json"), "USAGE"),
        (("topic", "list", "--jsn", "--json"), "USAGE"),
        (("topic", "list", "--json", "--bootstrap", "127.0.0.1:1"), "UNREACHABLE"),
        (("topic", "list", "--json", "--bootstrap", "http://x:1"), "INVALID_REQUEST"),
    ):
        result = smq(*arguments)
        assert (result.exit_code != 0, result.stdout) == (True, "")
        (line,) = result.stderr.splitlines()
        error = json.loads(line)["error"]
        assert error["code"] == code
        assert error.keys() == {"code", "message", "advice", "definite", "retriable"}


def test_a_groups_kafka_name_is_proposed(smq: Smq) -> None:
    assert "'kafka-cg-kg'" in smq("group", "describe", "kg").stderr
    assert "is 'kafka-cg-" not in smq("group", "describe", "kafka-cg-kg").stderr


def test_deletions_ask_only_at_a_terminal(smq: Smq, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.coordinator.cli.common.is_terminal", lambda: True)
    for answer in ("n\n", ""):
        refused = smq("topic", "delete", "t", input=answer)
        assert (refused.exit_code, "nothing was done" in refused.stderr) == (1, True)
        assert "t" in cluster.topics
    cluster.append("t", 0, [NewRecord(b"k", b"v", 1)])
    cluster.groups["readers"] = pb.DescribeGroupResponse(group=pb.GroupSummary(group="readers", state="Empty"))
    for other in (("topic", "trim", "t", "--offset", 1, "--partition", 0), ("group", "delete", "readers")):
        refused = smq(*other, input="n\n")
        assert (refused.exit_code, "nothing was done" in refused.stderr) == (1, True), other
    assert (cluster.topics["t"][0].log_start, set(cluster.groups)) == (0, {"readers"})
    assert smq("topic", "delete", "t", input="y\n").exit_code == 0
    cluster.create("t", 1)
    assert smq("topic", "delete", "t", "--yes").exit_code == 0
    cluster.create("t", 1)
    monkeypatch.setattr("smq.coordinator.cli.common.is_terminal", lambda: False)
    assert smq("topic", "delete", "t").exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_command(smq: Smq, shell: str) -> None:
    script = smq("completion", shell).stdout
    assert "_SMQ_COMPLETE" in script
    assert "smq" in script


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("smq topic describe ", "", {"t", "two"}),
        ("smq consume tw", "tw", {"two"}),
        ("smq to", "to", {"top", "topic"}),
        ("smq group describe ", "", {"readers"}),
        ("smq consume t --group r", "r", {"readers"}),
    ],
)
def test_names_of_topics_and_groups_are_completed(
    cluster: FakeCluster, environment: dict[str, str], words: str, last: str, expected: set[str]
) -> None:
    cluster.create("two", 1)
    cluster.groups["readers"] = pb.DescribeGroupResponse(group=pb.GroupSummary(group="readers", state="Empty"))
    asked = {"_SMQ_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    found = subprocess.run(CLI, env={**environment, **asked}, capture_output=True, text=True, timeout=60, check=True)
    assert {line.partition(",")[2] for line in found.stdout.splitlines()} == expected
    silent = {**environment, **asked, "SMQ_BOOTSTRAP": "127.0.0.1:1"}
    quiet = subprocess.run(CLI, env=silent, capture_output=True, text=True, timeout=60, check=True)
    assert quiet.stderr == ""


# ------------------------------------------------------------------------------------------------------- ends
def run(*arguments: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.parametrize("command", ["dev", "cluster"])
def test_a_directory_that_cannot_be_made_is_an_error_in_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    places = [str(tmp_path / "file" / "data")]
    if sys.platform == "linux":
        places.append("/proc/smq-data")
    for place in places:
        ended = run(command, "--data-dir", place)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"smq: {place} cannot be used as a data directory: ")
        assert len(ended.stderr.splitlines()) == 1


def test_a_configuration_that_is_no_text_is_an_error_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b'node_id = 1\ncluster_id = "\xff"\n')
    ended = run("serve", "--config", str(path))
    assert ended.returncode == 2
    assert "is not UTF-8: " in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_variable_of_another_program_does_not_keep_a_node_from_starting(tmp_path: Path) -> None:
    (tmp_path / "data").touch()  # no directory: the start ends there
    path = tmp_path / "node.toml"
    path.write_text('node_id = 1\ncluster_id = "c"\ndata_dir = "data"\n[peers]\n1 = "127.0.0.1:1"\n')
    ended = run("serve", "--config", str(path), env={**os.environ, "SMQ_ROOT": "/opt/smq"})
    warning = json.loads(ended.stderr.splitlines()[0])
    assert (warning["event"], warning["variable"], warning["level"]) == ("unknown_variable", "SMQ_ROOT", "warning")
    assert "SMQ_ROOT" not in ended.stderr.splitlines()[-1]


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    """The module that the command line imports first waits for the signal."""
    (tmp_path / "click.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    ended = run("status", env={**os.environ, "PYTHONPATH": path})
    assert (ended.returncode, ended.stderr) == (130, "")


def test_ctrl_c_while_a_command_waits_ends_without_a_traceback(
    cluster: FakeCluster, environment: dict[str, str]
) -> None:
    cluster.nodes[1].hook = lambda name, request: asyncio.sleep(60)
    with subprocess.Popen([*CLI, "topic", "list"], env=environment, stderr=subprocess.PIPE, text=True) as child:
        while not cluster.nodes[1].seen:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said.strip()) == (130, "")


# ------------------------------------------------------------------------------------------------------ tables
def test_no_cell_of_a_table_is_ever_cut() -> None:
    table = Table("name", "size", "where")
    table.add_row("a" * 100, "1,000", "x" * 100)
    table.add_row("日本", "7", "")
    assert table.lines() == [
        "name" + " " * 98 + " size  where",
        "a" * 100 + "  1,000  " + "x" * 100,
        "日本" + " " * 96 + "      7",
    ]


@pytest.mark.parametrize("text", ["", "yesterday", "1x", "-1h", "5", "1969-12-31", "99999999999w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no time"):
        MOMENT.convert(text, None, None)


def test_times_are_ages_dates_and_milliseconds() -> None:
    assert MOMENT.convert("2026-01-01T12:00Z", None, None) == 1_767_268_800_000
    assert MOMENT.convert("2026-01-01T12:00", None, None) == 1_767_268_800_000
    assert MOMENT.convert("2026-01-01T14:00+02:00", None, None) == 1_767_268_800_000
    assert MOMENT.convert("1767268800000", None, None) == 1_767_268_800_000
    assert MOMENT.convert("1w", None, None) < MOMENT.convert("6d", None, None) < MOMENT.convert("1h", None, None)
