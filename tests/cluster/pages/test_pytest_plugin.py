"""docs/testing.md, as it stands: a project with the plugin runs each of its examples, and nothing is left running."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.pages import claimed

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = claimed("docs/testing.md", __file__)
RUN_S = 200

LEFT_BEHIND = """
def test_one_leaves_every_fault_behind(smq_cluster, smq_faults):
    smq_faults.kill(1)
    smq_faults.pause(2)
    smq_faults.advance_clock(1_000)
    smq_faults.cluster.restart(1, wait=False)
    smq_faults.cluster.resume(2)
    smq_faults.isolate(3)
    smq_faults.pause(3)


def test_two_finds_a_whole_cluster(smq_cluster):
    assert len(smq_cluster.alive()) == 3
    smq_cluster.wait_ready()
    smq_cluster.make_topic(partitions=3)
    smq_cluster.wait_digests_equal()


def test_three_is_told_what_is_wrong(smq_faults):
    for sides in (({1}, {1, 2}), ({1}, {4})):
        try:
            smq_faults.partition(*sides)
        except ValueError as error:
            assert "[1, 2, 3]" in str(error)
        else:
            raise AssertionError(sides)
"""


def run(text: str, directory: Path, *options: str) -> str:
    """The plugin is named and no other is loaded: the installed smq may be another checkout."""
    (directory / "test_example.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "smq.testing.plugin", *options, "test_example.py"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=directory, env=environment, timeout=RUN_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("block", BLOCKS, ids=["one broker", "a cluster"])
def test_example_of_the_page_passes(block: str, tmp_path: Path) -> None:
    assert f"{block.count('def test_')} passed" in run(block, tmp_path)


def test_faults_end_with_their_test_and_no_process_stays(tmp_path: Path) -> None:
    assert "3 passed" in run(LEFT_BEHIND, tmp_path, f"--basetemp={tmp_path / 'base'}")
    running = [
        command for file in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in (command := _read(file))
    ]
    assert running == []


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # it has just ended


def test_the_plugin_is_installed_with_smq_and_imports_nothing_of_it_before_it_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"smq": "smq.testing.plugin"}
    code = "import sys, smq.testing.plugin; print([m for m in sys.modules if m.startswith('smq')])"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ)
    )
    assert found.stdout.strip() == "['smq', 'smq.testing', 'smq.testing.plugin']"
