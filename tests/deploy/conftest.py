"""Shared by these tests: the built wheel, an environment that has it, and Helm with the chart."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.helm import Chart
from tests.deploy.programs import go_program
from tests.kafka.foreign.clients import Missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the commands of an environment that has the wheel and, by path, this one's libraries."""
    home = tmp_path_factory.mktemp("installed") / "venv"  # as open to other users as any directory
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    directory = tmp_path_factory.mktemp("helm")
    try:
        return Chart(go_program("helm", directory), directory)
    except Missing as e:
        pytest.skip(f"Helm cannot be built here: {e}")
