"""Clusters that run the code of another commit, beside those of this tree.

Owns how such a tree is laid out in a temporary directory, and that its nodes really run its own files. It must never
measure.
"""

import contextlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from smq.testing.cluster import Cluster

ROOT: Final = Path(__file__).parents[1]


def started_from(version: str, directory: Path) -> Cluster:
    """A cluster of three nodes below `directory` that run the code of `version`. The caller stops it."""
    tree = directory / "tree"
    _lay_out(version, tree)
    cluster = Cluster(directory / "cluster")
    try:
        with contextlib.chdir(tree):  # which `python -m` looks into first
            where = [sys.executable, "-c", "import smq; print(smq.__file__)"]
            found = subprocess.run(where, check=True, capture_output=True, text=True).stdout
            if not Path(found).is_relative_to(tree):
                raise RuntimeError(f"the nodes would run {found.strip()}, not {tree}")
            cluster.start()
    except BaseException:  # Ctrl-C as well: no node may outlive this process
        cluster.stop()
        raise
    return cluster


def _lay_out(version: str, tree: Path) -> None:
    packed = tree.with_suffix(".tar")
    subprocess.run(["git", "archive", "--output", str(packed), version], cwd=ROOT, check=True)
    tree.mkdir()
    subprocess.run(["tar", "-xf", str(packed), "-C", str(tree)], check=True)  # tarfile's filters need Python 3.11.4
    # The command line asks for the version of its distribution, which had another name once.
    name = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["name"]
    about = tree / f"{name.replace('-', '_')}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
