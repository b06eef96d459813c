"""docs/testing.md, as it stands: every Python block is a file of tests, and passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import claimed

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = claimed("docs/testing.md", __file__)
RUN_S = 200


@pytest.mark.parametrize("block", BLOCKS, ids=["fake", "virtual clock"])
def test_example_of_the_page_passes(block: str, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "test_example.py"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=RUN_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def test_page_names_every_module_of_the_kit() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    modules = {path.stem for path in (ROOT / "smq/testing").iterdir() if not path.name.startswith("__")}
    assert {name for name in modules if f"`{name}`" not in page} == set()
