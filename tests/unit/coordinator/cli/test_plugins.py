"""A command of another package, as docs/extending.md shows it."""

import os
import subprocess
import tomllib
from pathlib import Path

from smq.testing.node_process import CLI
from tests.pages import ROOT, claimed


def test_a_package_adds_a_command_by_an_entry_point(tmp_path: Path) -> None:
    project, module = claimed("docs/extending.md", __file__)
    [(group, entries)] = tomllib.loads(project)["project"]["entry-points"].items()
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/cli.py").write_text(module)
    installed = tmp_path / "my_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
    (installed / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    ran = subprocess.run(
        [*CLI, "greet", "Ada"], check=False, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (ran.returncode, ran.stdout) == (0, "hello Ada\n"), ran.stderr
