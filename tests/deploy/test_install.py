"""The wheel as pip, uv and pipx install it: with what it declares, and nothing of this checkout.

Each environment is new and gets its libraries from the package index, so a library that `server` uses and does not
declare is missing there, and so is a version that its bounds should not admit.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smq import __version__
from tests.deploy.dev import running_dev
from tests.skips import needs

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(900)]

INSTALL_S = 600  # downloads included
OURS = ("SMQ_", "PYTHON", "VIRTUAL_ENV", "COVERAGE")


def environment(home: Path) -> dict[str, str]:
    """A user's, with a home of its own; how to reach the package index stays."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    here = str(Path(sys.executable).parent)
    return kept | {
        "PATH": os.pathsep.join(path for path in kept["PATH"].split(os.pathsep) if path != here),
        "UV_TOOL_DIR": str(home / "uv"),
        "PIPX_HOME": str(home / "pipx"),
        "PIPX_DEFAULT_PYTHON": sys.executable,
        "UV_PYTHON": sys.executable,
    }


def by_pip(wheel: Path, home: Path) -> list[str]:
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    pip = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, f"{wheel}[server]"],
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    assert done.returncode == 0, done.stderr
    return [str(home / "venv/bin/smq")]


def by_uvx(wheel: Path, _home: Path) -> list[str]:
    return ["uvx", "--quiet", "--from", f"{wheel}[server]", "smq"]


def by_pipx(wheel: Path, _home: Path) -> list[str]:
    return ["uvx", "--quiet", "pipx", "run", "--spec", f"{wheel}[server]", "smq"]


HOW = [
    pytest.param(by_pip, id="pip"),
    pytest.param(by_uvx, id="uvx", marks=needs("uvx")),
    pytest.param(by_pipx, id="pipx", marks=needs("uvx")),  # uvx brings pipx
]


@pytest.mark.parametrize("install", HOW)
def test_the_wheel_with_its_extra_serves_and_is_served(
    install: Callable[[Path, Path], list[str]], wheel: Path, tmp_path: Path
) -> None:
    smq, env = install(wheel, tmp_path), environment(tmp_path)

    def run(*arguments: str, text: str = "") -> str:
        done = subprocess.run(
            [*smq, *arguments],
            cwd=tmp_path,
            env=env,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with running_dev(smq, tmp_path, env, ready_within_s=INSTALL_S) as address:
        run("topic", "create", "t", "--bootstrap", address)
        run("produce", "t", "--bootstrap", address, text="one\ntwo\n")
        assert run("consume", "t", "--bootstrap", address).split() == ["one", "two"]
        assert json.loads(run("status", "--json", "--bootstrap", address))["is_well"]
        assert run("--version").split()[-1] == __version__
