"""`make quick`: which tests belong to a changed file."""

from pathlib import Path

import pytest

from tests.changed import ALWAYS, selected, unit_tests_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("smq/records.py", "tests/unit/test_records.py"),
        ("smq/raft_state/ids.py", "tests/unit/raft_state"),
        ("smq/clients/proto/smq/v1/smq.proto", "tests/unit/clients"),
        ("chaos_tests/checkers/base.py", "tests/sim/checkers"),
        ("tests/unit/test_records.py", "tests/unit/test_records.py"),
        ("tests/unit/clients/gone.py", "tests/unit/clients"),
        ("smq/__init__.py", None),
        ("README.md", None),
    ],
)
def test_a_changed_file_has_the_unit_tests_of_its_room(changed: str, tests: str | None) -> None:
    assert unit_tests_of(changed, ROOT) == tests


def test_a_test_that_its_folder_has_is_not_named_again() -> None:
    changed = ["smq/raft_state/ids.py", "tests/unit/raft_state/test_machine.py", "README.md"]
    assert selected(changed, ROOT) == sorted(["tests/unit/raft_state", *ALWAYS])
