"""`make release` refuses what is not ready, and tags what it has built. It pushes nothing."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.release import Refused, check, newest_heading, release
from smq import __version__

ROOT = Path(__file__).resolve().parents[2]


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--message", "Ready")


def edit(root: Path, name: str, pattern: str, replacement: str) -> None:
    path = root / name
    text, count = re.subn(pattern, replacement, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def set_heading(root: Path, heading: str) -> None:
    edit(root, "CHANGELOG.md", r"(?m)^## .+$", f"## {heading}")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a wheel is built of, in a repository of its own that is ready for a release. Its origin is another one."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, root)
    for name in ("smq", "pyspark_smq"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    set_heading(root, f"{__version__}, 2026-01-31")
    git(tmp_path, "init", "--quiet", "--bare", "origin")
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "a")
    git(root, "config", "user.email", "a@example.org")
    git(root, "remote", "add", "origin", str(tmp_path / "origin"))
    commit(root)
    return root


def test_the_newest_heading_of_the_changelog_names_the_version() -> None:
    heading = newest_heading((ROOT / "CHANGELOG.md").read_text())
    assert re.fullmatch(rf"{re.escape(__version__)}, (not released yet|\d{{4}}-\d\d-\d\d)", heading)


def test_a_release_is_built_and_then_tagged_where_it_is(project: Path) -> None:
    assert release(project) == f"v{__version__}"
    assert f"smq_log-{__version__}-py3-none-any.whl" in {path.name for path in (project / "dist").iterdir()}
    assert git(project, "rev-parse", f"v{__version__}^{{commit}}") == git(project, "rev-parse", "HEAD")
    assert git(project, "ls-remote", "origin") == ""
    assert git(project, "status", "--porcelain") == ""
    with pytest.raises(Refused, match=rf"the tag v{__version__} exists"):
        check(project)


def test_a_build_that_fails_leaves_no_tag(project: Path) -> None:
    (project / "README.md").unlink()
    commit(project)
    with pytest.raises(subprocess.CalledProcessError):
        release(project)
    assert git(project, "tag") == ""


@pytest.mark.parametrize(
    ("change", "is_committed", "why"),
    [
        (lambda root: (root / "new").touch(), False, "the working tree has changes"),
        (lambda root: set_heading(root, f"{__version__}, not released yet"), True, "with the date of the release"),
        (lambda root: set_heading(root, f"{__version__}, 2026-02-30"), True, "with the date of the release"),
        (lambda root: set_heading(root, "9.9.9, 2026-01-31"), True, "make them agree"),
        (
            lambda root: edit(root, "smq/__init__.py", "__version__ = .*", '__version__ = "9.9.9"'),
            True,
            "make them agree",
        ),
        (lambda root: edit(root, "smq/__init__.py", "__version__ = ", "version = "), True, "names no __version__"),
    ],
)
def test_what_is_not_ready_is_refused(
    project: Path, change: Callable[[Path], None], is_committed: bool, why: str
) -> None:
    assert check(project) == f"v{__version__}"
    change(project)
    if is_committed:
        commit(project)
    with pytest.raises(Refused, match=why):
        release(project)
    assert git(project, "tag") == ""
    assert not (project / "dist").exists()


def test_the_bill_of_materials_has_what_a_server_is_made_of(tmp_path: Path) -> None:
    """By the command of `make sbom`."""
    if importlib.util.find_spec("cyclonedx_py") is None:
        pytest.skip("cyclonedx-bom is not installed")
    recipe = subprocess.run(["make", "-n", "sbom", "PY=python"], cwd=ROOT, check=True, capture_output=True, text=True)
    (words,) = [line.split() for line in recipe.stdout.replace("\\\n", " ").splitlines() if "cyclonedx_py" in line]
    out = tmp_path / "sbom.json"
    subprocess.run([sys.executable, *words[1:-1], str(out)], cwd=ROOT, check=True)
    bill = json.loads(out.read_text())
    locked = re.findall(r"(?m)^([\w.-]+)==([^ ;]+)", (ROOT / "locks/server.txt").read_text())
    assert bill["metadata"]["component"]["name"] == "smq-log"
    assert sorted((c["name"], c["version"]) for c in bill["components"]) == sorted(locked)
    assert all(c["externalReferences"][0]["hashes"] for c in bill["components"])
