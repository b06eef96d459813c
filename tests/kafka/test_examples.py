"""examples/kafka: each language's program, started twice, as its first lines say."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from smq.testing.cluster import Cluster
from tests.kafka.foreign.clients import Missing, run
from tests.pages import ROOT

pytestmark = pytest.mark.timeout(600)

CUSTOMERS = ("ada", "ben", "cleo")


def _python(_directory: Path) -> list[str]:
    return [sys.executable, "-m", "examples.kafka.python.orders"]


def _java(directory: Path) -> list[str]:
    run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
    return ["java", "-Xmx256m", "-cp", f"{directory}/jars/*", f"{directory}/Orders.java"]


def _go(directory: Path) -> list[str]:
    run(directory, "go", "build", "-o", "orders", ".")
    return [f"{directory}/orders"]


def _node(directory: Path) -> list[str]:
    run(directory, "npm", "ci", "--no-audit", "--no-fund")
    return ["node", f"{directory}/orders.js"]


BUILDS: dict[str, Callable[[Path], list[str]]] = {"python": _python, "java": _java, "go": _go, "node": _node}
EACH = [pytest.param(name, marks=() if name == "python" else pytest.mark.full) for name in BUILDS]


def test_every_example_has_a_build() -> None:
    assert {path.name for path in (ROOT / "examples/kafka").iterdir() if not path.name.startswith("__")} == set(BUILDS)


@pytest.mark.parametrize("language", EACH)
def test_ten_orders_are_written_and_the_group_goes_on_where_it_ended(
    cluster: Cluster, bootstrap: str, tmp_path: Path, language: str
) -> None:
    directory, topic = tmp_path / language, cluster.make_topic()
    copytree(ROOT / "examples/kafka" / language, directory)
    try:
        command = BUILDS[language](directory)
    except Missing as e:
        pytest.skip(f"{language}: {e}")
    for first in (0, 10):
        done = subprocess.run(
            [*command, bootstrap, topic], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        expected = [f"0/{first + n} {CUSTOMERS[n % 3]}: order {n}" for n in range(10)]
        assert done.stdout.splitlines() == expected
        assert cluster.nodes[1].raw.committed(f"kafka-cg-{topic}-{language}", topic, 0) == first + 10
