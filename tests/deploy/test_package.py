"""The built package: its name and version, what is in it, that it is the same each time, and that it runs."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import smq
from tests.deploy.dev import running_dev

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("smq", "pyspark_smq", "pyproject.toml", "README.md", "LICENSE")


def build(source: Path, kind: str, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = target.iterdir()
    return built


def metadata_of(wheel: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The fields of METADATA, and the names of all files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in message}, names


def test_the_wheel_has_a_name_of_its_own_and_the_version_of_the_code(wheel: Path) -> None:
    assert wheel.name == f"smq_log-{smq.__version__}-py3-none-any.whl"
    fields, _ = metadata_of(wheel)
    assert (fields["Name"], fields["Version"]) == (["smq-log"], [smq.__version__])
    assert fields["License-Expression"] == ["Apache-2.0"]
    assert {"server", "spark", "testing", "dev"} <= set(fields["Provides-Extra"])
    assert fields["Description-Content-Type"] == ["text/markdown"]


def test_the_wheel_has_the_library_its_types_and_its_licence_and_nothing_else(wheel: Path) -> None:
    _, names = metadata_of(wheel)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"smq", "pyspark_smq", f"smq_log-{smq.__version__}.dist-info"}
    assert {"smq/py.typed", "pyspark_smq/py.typed", "smq/clients/proto/smq/v1/smq.proto"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(ROOT, "sdist", tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path)  # tarfile has no filters before 3.11.4
    again = build(tmp_path / archive.name.removesuffix(".tar.gz"), "wheel", tmp_path / "again")
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_a_build_elsewhere_and_later_has_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in BUILT_FROM:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    for path in copy.rglob("*.py"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    again = build(copy, "wheel", tmp_path / "again")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def run(installed: Path, *arguments: str, text: str = "") -> str:
    env = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(installed.parent)}
    command = [str(installed / "smq"), *arguments]
    done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def dev(installed: Path, tmp_path: Path) -> Iterator[str]:
    """The gRPC address of `smq dev` from the wheel."""
    with running_dev([str(installed / "smq")], tmp_path, {"PATH": "/usr/bin:/bin"}) as address:
        yield address


def test_the_installed_wheel_serves_and_is_served(installed: Path, dev: str) -> None:
    run(installed, "topic", "create", "t", "--bootstrap", dev)
    run(installed, "produce", "t", "--bootstrap", dev, text="one\ntwo\n")
    assert run(installed, "consume", "t", "--bootstrap", dev).split() == ["one", "two"]
    assert run(installed, "--version").split()[-1] == smq.__version__
