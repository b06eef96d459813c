"""Makes a release of what is committed: `make release`, whose steps are in CONTRIBUTING.md.

Owns the checks before it, the build and the tag, in that order: a refusal or a failed build leaves no tag. It must
never push, and never change a committed file: version and date are decisions, which are committed before. Only the
Makefile and tests/deploy/test_release.py use it.
"""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Final

_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
_HEADING: Final = re.compile(r"^## (.+)$", re.MULTILINE)


class Refused(Exception):
    """Nothing was built or tagged; the text says why, and what to do."""


def release(root: Path) -> str:
    """The tag, of the present commit. The wheel and the source archive are in `dist`."""
    tag = check(root)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", "dist"], cwd=root, check=True)
    _git(root, "tag", "--annotate", tag, "--message", f"smq {tag.removeprefix('v')}")
    return tag


def check(root: Path) -> str:
    """The tag that the present commit would get. Refused if it is not ready for one."""
    found = _VERSION.search((root / "smq/__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise Refused("smq/__init__.py names no __version__")
    version = found[1]
    if _git(root, "status", "--porcelain"):
        raise Refused("the working tree has changes: commit or remove them, so that the tag names what is built")
    heading = newest_heading((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    named, _, when = heading.partition(", ")
    if named != version:
        raise Refused(f"CHANGELOG.md begins with {heading!r}, and __version__ is {version}: make them agree")
    try:
        date.fromisoformat(when)
    except ValueError:
        raise Refused(
            f"CHANGELOG.md begins with {heading!r}: replace what follows the version with the date of the release, as "
            f"in '{version}, 2026-01-31', and commit that"
        ) from None
    tag = f"v{version}"
    if _git(root, "tag", "--list", tag):
        raise Refused(f"the tag {tag} exists: raise __version__ for the next release")
    return tag


def newest_heading(changelog: str) -> str:
    found = _HEADING.search(changelog)
    if found is None:
        raise Refused("CHANGELOG.md has no heading of a version")
    return found[1]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    try:
        tag = release(Path(__file__).resolve().parents[1])
    except Refused as e:
        sys.exit(f"no release: {e}")
    sys.stdout.write(f"{tag} is tagged, and dist has its files. Nothing was pushed: git push origin {tag}\n")


if __name__ == "__main__":
    main()
