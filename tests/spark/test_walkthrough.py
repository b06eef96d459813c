"""docs/walkthrough.md as it is: every Python block in order, and its output."""

import ast
import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from smq.testing.cluster import Cluster
from smq.testing.node_process import CLI, end, wait_for
from tests.pages import claimed

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_every_block_runs_and_prints_what_the_page_says(spark: SparkSession, cluster: Cluster, servers: str) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert [text for block in blocks for text in block if text] == claimed("docs/walkthrough.md", __file__)
    assert len(blocks) >= 8
    names: dict[str, object] = {"spark": spark, "servers": servers}
    for number, (source, wanted) in enumerate(blocks, 1):
        if "replica_lag" in source:
            cluster.wait_converged("sensors", 2)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for statement in ast.parse(source).body:  # as a console does it, which shows the value of an expression
                one = ast.Interactive([statement])
                exec(compile(one, f"{PAGE.name}, block {number}", "single"), names)
        assert printed.getvalue() == wanted, source


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(280)
def test_the_page_piped_into_the_shell_prints_the_same_and_no_traceback(tmp_path: Path) -> None:
    """As a newcomer does it: `smq dev` and `smq spark-shell`. Spark's own workers used to leave tracebacks."""
    blocks = BLOCK.findall(PAGE.read_text())
    ready = tmp_path / "ready.json"
    ports = ("--grpc-port", "0", "--http-port", "0", "--kafka-port", "0")
    node = subprocess.Popen([*CLI, "dev", "--ephemeral", *ports, "--ready-file", str(ready)], cwd=tmp_path)
    try:
        wait_for("the node", ready.exists)
        address = json.loads(ready.read_text())["nodes"][0]["grpc"]
        typed = "\n".join(source for source, _ in blocks)
        shell = subprocess.run(
            [*CLI, "spark-shell", "--bootstrap", address],
            input=typed,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    finally:
        end(node)
    assert shell.returncode == 0, shell.stderr
    assert shell.stdout == "".join(wanted for _, wanted in blocks)
    assert "Traceback" not in shell.stderr
