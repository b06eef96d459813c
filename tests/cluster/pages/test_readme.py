"""The README's quick start, run as it stands on a real cluster. tests/spark/test_readme.py has its block for Spark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smq.testing.cluster import Cluster
from tests.pages import claimed

ROOT = Path(__file__).resolve().parents[3]
RUN_S = 200
WRITTEN = "127.0.0.1:7401"  # the address that the README names


SHELL, PYTHON = claimed("README.md", __file__)


def _run(command: list[str], cluster: Cluster, directory: Path) -> str:
    """Standard output; the test fails if the command does."""
    bin_dir = str(Path(sys.executable).parent)
    environment = dict(os.environ, PATH=f"{bin_dir}:{os.environ['PATH']}", SMQ_BOOTSTRAP=cluster.nodes[1].grpc)
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=directory, env=environment, timeout=RUN_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def shell_output(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the README's shell block. The later blocks use the topics and records that it made."""
    return _run(["sh", "-e", "-c", SHELL], cluster, tmp_path_factory.mktemp("readme"))


def test_shell_lines_produce_and_consume(shell_output: str) -> None:
    assert "hello\nworld\n" in shell_output
    assert '"offset": 1' in shell_output or '"offset":1' in shell_output


def test_python_block_publishes_and_reads_back(shell_output: str, cluster: Cluster, tmp_path: Path) -> None:
    script = PYTHON.replace(WRITTEN, cluster.nodes[1].grpc)
    assert "b'from python'" in _run([sys.executable, "-c", script], cluster, tmp_path)
