"""`smq spark-shell`: a shell with Spark on a running cluster, and its errors if that is impossible."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smq.records import NewRecord
from smq.spark_connector.local_session import SHORT_LIVED
from smq.spark_connector.shell import banner
from smq.testing.cluster import Cluster
from smq.testing.node_process import CLI, run_cli

COMMANDS = """\
frame = spark.read.format("smq").options(servers=servers, subscribe={topic!r}).load()
frame.count()
for row in frame.orderBy("offset").collect():
    print(row["offset"], row["value"].decode())

spark.conf.get("spark.sql.shuffle.partitions"), spark.sparkContext.master
"""


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_piped_commands_read_the_cluster(cluster: Cluster, publish: Callable[..., None]) -> None:
    """It finds a running cluster like other commands: here by its directory."""
    topic = "a-shell-topic"  # the banner names the first topics only, and other tests have made many
    cluster.alive()[0].raw.create_topic(topic, 1)
    publish(topic, 0, [NewRecord(None, b"v%d" % i, 1) for i in range(3)])
    options: tuple[str, ...] = (
        "--cluster-dir",
        str(cluster.root / "data"),
        "--master",
        "local[1]",
        "--conf",
        "spark.sql.shuffle.partitions=3",
    )
    options += tuple(part for name, value in SHORT_LIVED.items() for part in ("--conf", f"{name}={value}"))
    result = run_cli("spark-shell", *options, input=COMMANDS.format(topic=topic) + "undefined\n", timeout_s=350)
    assert result.stdout.splitlines() == ["3", "0 v0", "1 v1", "2 v2", "('3', 'local[1]')"], result.stderr
    assert f"{topic} (1)" in result.stderr
    assert "NameError: name 'undefined'" in result.stderr
    assert result.returncode == 1


def test_banner_names_topics_and_its_lines_can_be_typed() -> None:
    text = banner("4.3.0", "h:1", {"my-topic": 3, "a.b": 1, **{f"t{i:02}": 1 for i in range(20)}})
    assert "a.b (1), my-topic (3)" in text
    assert text.count(" (1)") == 9
    assert "and 12 more" in text
    typed = [line for line in text.splitlines() if line.startswith("  ")]
    assert typed[0] == '  a_b = spark.read.format("smq").options(servers=servers, subscribe="a.b").load()'
    for line in typed:
        compile(line.strip(), "banner", "exec")


@pytest.mark.parametrize("topics", [{"spark": 1}, {"1": 1}, {"class": 1}])
def test_banner_names_no_variable_that_python_cannot_have(topics: dict[str, int]) -> None:
    assert "  frame = spark.read" in banner("4.3.0", "h:1", topics)


def test_missing_cluster_is_reported_before_spark_starts() -> None:
    result = run_cli("spark-shell", "--bootstrap", "127.0.0.1:9", input="")
    assert result.returncode == 1
    assert "127.0.0.1:9" in result.stderr
    assert "start a node with `smq dev`" in result.stderr


def test_directory_without_a_cluster_is_reported(tmp_path: Path) -> None:
    result = run_cli("spark-shell", "--cluster-dir", str(tmp_path), input="")
    assert result.returncode != 0
    assert f"{tmp_path} holds no cluster" in result.stderr


def without(*modules: str) -> list[str]:
    """The command line in an interpreter that lacks these modules."""
    gone = f"sys.modules.update(dict.fromkeys({modules!r}))"
    return [sys.executable, "-c", f"import sys; {gone}; from smq.coordinator.cli.main import main; main()"]


def test_shell_needs_nothing_of_the_server() -> None:
    command = without("aiohttp", "lmdb", "prometheus_client", "pysyncobj", "rich", "structlog", "uvloop", "pyspark")
    help_of = subprocess.run([*command, "spark-shell", "--help"], check=True, capture_output=True, text=True)
    assert "Opens a Python shell with a Spark session" in help_of.stdout
    result = subprocess.run([*command, "spark-shell"], check=False, capture_output=True, text=True)
    advice = "pip install '.[spark]' in a clone of smq, or its wheel with [spark]"
    assert (result.returncode, result.stderr) == (1, f"Error: the Spark shell needs pyspark: {advice}\n")
    result = subprocess.run([*command, "dev"], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: this needs the package ")
    assert "pip install '.[server]' in a clone of smq, or " in result.stderr


def test_command_line_without_click_says_which_extra_it_needs() -> None:
    result = subprocess.run([*without("click"), "status"], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("smq: the command line needs the extra server (or spark): pip install '.[server]' ")


def test_help_names_the_shell() -> None:
    result = subprocess.run([*CLI, "--help"], check=True, capture_output=True, text=True)
    assert "spark-shell  Opens a Python shell" in result.stdout
