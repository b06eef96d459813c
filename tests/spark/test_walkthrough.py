"""docs/walkthrough.md as it is: every Python block in order, and its output."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from smq.testing.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_every_block_runs_and_prints_what_the_page_says(spark: SparkSession, cluster: Cluster, servers: str) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == PAGE.read_text().count("```python") >= 8
    names: dict[str, object] = {"spark": spark, "servers": servers}
    for number, (source, wanted) in enumerate(blocks, 1):
        if "replica_lag" in source:
            cluster.wait_converged("sensors", 2)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{PAGE.name}, block {number}", "exec"), names)
        assert printed.getvalue() == wanted, source
