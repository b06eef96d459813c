"""`smq produce`: keys and headers, and what Ctrl-C says."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from smq.coordinator.cli.input import Shape
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import FakeCluster
from smq.testing.node_process import CLI

Smq = Callable[..., Result]
MAIN = "smq.coordinator.cli.main"


@pytest.fixture
def produce(smq: Smq, tmp_path: Path) -> Smq:
    """`produce(text, *options)`: sends a file with this text to the topic t."""

    def run(text: object, *options: object) -> Result:
        source = tmp_path / "input.txt"
        source.write_text(str(text))
        return smq("produce", "t", source, *options)

    return run


def stored(smq: Smq, output: str) -> list[str]:
    return sorted(smq("consume", "t", "--output", output).stdout.splitlines())


def test_every_record_gets_the_key_and_the_headers(smq: Smq, produce: Smq) -> None:
    assert produce("x\ny\n", "--key", "k", "-H", "a=1", "-H", "b=").exit_code == 0
    assert stored(smq, "%k %h %v") == ["k a=1,b= x", "k a=1,b= y"]


def test_a_separator_divides_key_and_value(smq: Smq, produce: Smq) -> None:
    sent = produce("a: 1\nb: 2: 3\n: 4\n", "--key-separator", ": ", "--json")
    assert json.loads(sent.stdout) == {"topic": "t", "stored": 3}
    assert stored(smq, "%k=%v") == ["=4", "a=1", "b=2: 3"]
    broken = produce("a:1\nb\n", "--key-separator", ":")
    assert broken.exit_code == 1
    assert (
        "line 2: there is no ':' between key and value; stored 1 record in t, all up to line 1. `--from-line 2`"
        in broken.stderr
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--key", "a", "--key-separator", ":"), "pass one of them"),
        (("--key-separator", ""), "--key-separator is empty"),
        (("--key-separator", ":", "--format", "jsonl"), "needs --format lines"),
        (("-H", "=1"), "is no header"),
        (("--delivery-timeout", "5"), "'5' is no duration: write a number and a unit (500ms, 30s, 5m)"),
        (("--delivery-timeout", "0s"), "is no duration"),
    ],
)
def test_options_that_make_no_sense_are_refused(produce: Smq, options: tuple[str, ...], says: str) -> None:
    refused = produce("x\n", *options)
    assert refused.exit_code != 0
    assert says in refused.stderr


def test_headers_of_the_input_stay_beside_those_of_the_command() -> None:
    from smq.coordinator.cli.input import InputRecord, LineSource

    record = InputRecord(b"v", None, [("own", b"1")])
    made = Shape(format_name="records", headers=[("all", b"2")]).applied(LineSource(0, "x"), record)
    assert made.headers == [("own", b"1"), ("all", b"2")]


def test_ctrl_c_says_how_far_it_got(cluster: FakeCluster, environment: dict[str, str], tmp_path: Path) -> None:
    """At a terminal, the input does not end by itself: 300 lines are stored, and the command waits for more."""
    command = [*CLI, "produce", "t", "--partition", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdin is not None
        child.stdin.write("".join(f"{n}\n" for n in range(300)))
        child.stdin.flush()
        for _ in range(600):
            if cluster.topics["t"][0].hwm == 300:
                break
            time.sleep(0.1)
        assert cluster.topics["t"][0].hwm == 300
        time.sleep(0.5)  # the last answers reach the command
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    lines = [line for line in said.splitlines() if not line.startswith(("waiting", "going on"))]
    assert lines == ["smq: interrupted: stored 300 records in t, all up to line 300. `--from-line 301` sends the rest"]


def test_an_error_says_how_far_it_got_and_where_to_go_on(
    cluster: FakeCluster, environment: dict[str, str], tmp_path: Path
) -> None:
    """The second chunk is refused: the first is stored, and every line is stored once in the end."""
    source = tmp_path / "input.txt"
    source.write_text("".join(f"{n:0100}\n" for n in range(12_000)))

    def full_after_a_chunk(name: str, request: object) -> None:
        if name == "PublishRecord" and cluster.topics["t"][0].hwm >= 5_000:
            raise SmqError(ErrorCode.STORAGE_FULL, "node 1 has less free space than its reserve")

    def send(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [*CLI, "produce", "t", "--partition", "0", str(source), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    cluster.nodes[1].hook = full_after_a_chunk
    refused = send("--delivery-timeout", "2s")
    assert refused.returncode == 1
    found = re.search(
        r"STORAGE_FULL.* stored ([\d,]+) records? in t, all up to line ([\d,]+)(?: and ([\d,]+) of later lines)?\. "
        r"`--from-line (\d+)` sends the rest",
        refused.stderr,
    )
    assert found is not None, refused.stderr
    stored, line, later, go_on = (int((text or "0").replace(",", "")) for text in found.groups())
    assert stored == cluster.topics["t"][0].hwm == line + later
    assert go_on == line + 1 > 5_000
    assert "Traceback" not in refused.stderr
    assert "never retrieved" not in refused.stderr
    cluster.nodes[1].hook = lambda _name, _request: None
    assert send("--from-line", str(stored + 1)).returncode == 0
    assert cluster.topics["t"][0].hwm == 12_000


@pytest.mark.parametrize(
    ("options", "text", "values"),
    [
        ((), "a\nb\nc\n", ["c"]),
        (("--format", "jsonl"), "1\n2\n3\n", ["3"]),
        (("--format", "records"), '{"value": "a"}\n{"value": "b"}\n{"value": "c"}\n', ["c"]),
        (("--format", "csv"), 'n\n"a\n"\nb\n', ['{"n":"b"}']),
    ],
)
def test_a_run_goes_on_at_a_line(
    smq: Smq, produce: Smq, options: tuple[str, ...], text: str, values: list[str]
) -> None:
    assert produce(text, *options, "--from-line", "4" if "csv" in options else "3").exit_code == 0
    assert stored(smq, "%v") == values


def test_a_node_without_space_is_named_while_produce_waits(cluster: FakeCluster, environment: dict[str, str]) -> None:
    """It was silent for a minute."""

    def full(name: str, _request: object) -> None:
        if name == "PublishRecord":
            raise SmqError(ErrorCode.STORAGE_FULL, "node 1 has less free space than its reserve")

    cluster.nodes[1].hook = full
    command = [*CLI, "produce", "t", "--partition", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write("x\n")
        child.stdin.close()
        reason = r"waiting for .* \(STORAGE_FULL: node 1 has less free space"
        assert any(re.match(reason, child.stderr.readline()) for _ in range(2))  # the first may precede any answer
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130


def test_without_a_bar_nothing_that_draws_one_is_loaded(environment: dict[str, str], tmp_path: Path) -> None:
    """58 modules, 25 ms of CPU."""
    source = tmp_path / "input.txt"
    source.write_text("x\n")
    script = (
        f"import atexit, sys; atexit.register(lambda: print('rich' in sys.modules)); from {MAIN} import main; main()"
    )
    command = [sys.executable, "-c", script, "produce", "t", str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "stored 1 record in t\n")
