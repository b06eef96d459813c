"""Under TESTS_SKIP_NOTHING every skip is a failure with its reason, wherever a test asks for it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.skips import NOTHING, needs

ROOT = Path(__file__).resolve().parents[2]
SKIPPING = """
import pytest
from tests.skips import needs

@needs("sh")
def test_that_runs(): pass
@needs("sh", "no-such-program")
def test_by_mark(): pass
def test_by_call(): pytest.skip("no root here")
@pytest.fixture
def machine(): pytest.skip("no machine here")
def test_by_fixture(machine): pass
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail(): assert False
"""
WHOLE_FILE = "import pytest\npytest.skip('no such system', allow_module_level=True)\n"


def outcome(tmp_path: Path, text: str, **env: str) -> tuple[int, str]:
    (tmp_path / "conftest.py").write_text("from tests.skips import install as pytest_configure\n")
    (tmp_path / "test_these.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    own = {name: value for name, value in os.environ.items() if name != NOTHING and not name.startswith("PYTEST_")}
    env = own | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


def test_a_skip_is_a_skip_by_default(tmp_path: Path) -> None:
    code, printed = outcome(tmp_path, SKIPPING)
    assert (code, "1 passed, 3 skipped, 1 xfailed" in printed) == (0, True), printed


def test_a_skip_is_a_failure_with_its_reason_if_nothing_may_be_skipped(tmp_path: Path) -> None:
    code, printed = outcome(tmp_path, SKIPPING, **{NOTHING: "1"})
    assert (code, "1 failed, 1 passed, 1 xfailed, 2 errors" in printed) == (1, True), printed
    for reason in ("not installed: no-such-program", "no root here", "no machine here"):
        assert f"a skip is a failure: Skipped: {reason}" in printed
    code, printed = outcome(tmp_path, WHOLE_FILE, **{NOTHING: "1"})
    assert (code != 0, "no such system" in printed) == (True, True), printed


def test_the_release_run_skips_nothing() -> None:
    (recipe,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if NOTHING in line]
    assert recipe == f'\t{NOTHING}=1 $(PYTEST) -m "" $(SUITES)'


def test_a_mark_names_each_program_that_is_missing() -> None:
    assert needs("sh", "no-such-1", "no-such-2").kwargs["reason"] == "not installed: no-such-1, no-such-2"
    assert needs("sh").args == (False,)
