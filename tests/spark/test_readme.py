"""The README's block for Spark: in the session that the tests share, and in a process of its own as a newcomer's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from smq.clients import SyncAdmin, SyncProducer
from smq.testing.cluster import live_cluster
from tests.pages import ROOT, claimed

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

WRITTEN = "127.0.0.1:7401"  # the address that the README names
RUN_S = 280  # a Spark session starts within 15 s, and within minutes on two cores that others keep busy
[BLOCK] = claimed("README.md", __file__)


def greet(servers: str) -> None:
    """What the README's shell block has left."""
    with SyncAdmin(servers) as admin, SyncProducer(servers) as producer:
        admin.create_topic("greetings", 3)
        producer.send_many("greetings", [b"hello", b"world"], partition=0)


def check(shown: str) -> None:
    assert re.search(r"\|\s*0\|\s*0\|\s*hello\|", shown)
    assert re.search(r"\|\s*0\|\s*1\|\s*world\|", shown)
    assert "from Spark|" in shown


def test_the_block_shows_every_record(
    spark: SparkSession, servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)  # other tests use it, too
    greet(servers)
    exec(compile(BLOCK.replace(WRITTEN, servers), "README.md", "exec"), {})
    check(capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.timeout(RUN_S + 20)
def test_the_block_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    with live_cluster(tmp_path / "cluster") as cluster:
        greet(cluster.servers)
        ran = subprocess.run(
            [sys.executable, "-c", BLOCK.replace(WRITTEN, cluster.nodes[1].grpc)],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            timeout=RUN_S,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check(ran.stdout)
