"""Prints the tests that `make quick` runs: the unit tests of the rooms that differ from main.

Owns the way from a changed file to its tests: `tests/unit` has the rooms of `smq`. Every change also has the tests of
the repository and of its pages. Run as `python -m tests.changed`, from the root.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Final

ALWAYS: Final = ("tests/unit/test_repository.py", "tests/unit/test_pages.py")
NEEDS_SPARK: Final = "tests/unit/spark_connector"
_ROOMS: Final = {"smq": "tests/unit", "docs": "tests/unit", "chaos_tests/checkers": "tests/sim/checkers"}


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


def changed_files() -> list[str]:
    """Committed since main, or not committed yet."""
    upstream = "origin/main" if _git("branch", "--remotes", "--list", "origin/main") else "main"
    (base,) = _git("merge-base", "HEAD", upstream)
    return _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")


def unit_tests_of(name: str, root: Path) -> str | None:
    """The changed test itself, or the folder with the tests of the file's room. None if it has no unit tests."""
    path = PurePath(name)
    if name.startswith("tests/unit/"):
        return name if path.name.startswith("test_") and (root / name).exists() else str(path.parent)
    for room, tests in _ROOMS.items():
        if path.is_relative_to(room):
            inside = PurePath(tests) / path.relative_to(room)
            folder = next(parent for parent in inside.parents if (root / parent).is_dir())
            own = inside.with_name(f"test_{path.stem}.py")
            if folder != PurePath("tests/unit"):
                return str(folder)
            return str(own) if (root / own).exists() else None
    return None


def selected(names: list[str], root: Path) -> list[str]:
    """Every test once: a folder has its files."""
    found = {tests for name in names if (tests := unit_tests_of(name, root)) is not None} | set(ALWAYS)
    return sorted(t for t in found if not any(str(parent) in found for parent in PurePath(t).parents))


if __name__ == "__main__":
    chosen = selected(changed_files(), Path())
    if find_spec("pyspark") is None and any(test.startswith(NEEDS_SPARK) for test in chosen):
        sys.stderr.write(f"left out: {NEEDS_SPARK}, which needs Spark (`make setup`)\n")
        chosen = [test for test in chosen if not test.startswith(NEEDS_SPARK)]
    sys.stdout.write(" ".join(chosen) + "\n")
