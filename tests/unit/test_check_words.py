"""The word list of the lint run: every phrase is found in pages, comments, docstrings and strings, and nowhere else."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "check_words.py"
CHECK: dict[str, Any] = runpy.run_path(str(SCRIPT), run_name="check_words")


def _found(text: str, *, is_code: bool) -> list[tuple[int, str]]:
    return [(line, phrase) for line, phrase, _ in CHECK["findings"](text, is_code=is_code)]


@pytest.mark.parametrize("phrase", CHECK["PHRASES"], ids=lambda phrase: phrase.example)
def test_each_phrase_is_found_in_a_page_and_in_code(phrase: Any) -> None:
    assert phrase.regex.search(phrase.example)
    assert _found(phrase.example, is_code=False)
    assert _found(f"# {phrase.example}\n", is_code=True)


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n# It stops, and a node is told so.\n",
        'def f():\n    """It stops, and a node is told so."""\n',
        "x = 1\nraise ValueError('a node is told')\n",
        "x = 1\ny = f'{x} is told'\n",
    ],
)
def test_planted_phrase_is_found_on_its_line(source: str) -> None:
    assert _found(source, is_code=True) == [(2, "is told")]


def test_phrase_over_two_lines_is_found_where_it_begins() -> None:
    assert _found("# a node is\n# told so\n", is_code=True) == [(1, "is told")]
    assert _found("A node is\ntold so.\n", is_code=False) == [(1, "is told")]


def test_code_is_no_phrase_and_divides_comments() -> None:
    assert _found("nobody = whoever(is_told)\n", is_code=True) == []
    assert _found("x = 1  # what is\ny = 2  # told\n", is_code=True) == []


def test_lint_run_fails_on_a_planted_phrase_and_says_what_to_write(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("One fsync per round.\nA node is told.\n")
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(page)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f'{page}:2: "is told": write: learns' in result.stdout


def test_pages_are_checked_unless_they_are_generated() -> None:
    assert CHECK["is_checked"]("ARCHITECTURE.md")
    assert CHECK["is_checked"]("Makefile")
    assert CHECK["is_checked"]("smq/records.py")
    assert _found("# Page\n\nGenerated from code by `make docs`.\n\nA node is told.\n", is_code=False) == []


def test_exempt_files_exist() -> None:
    assert all((ROOT / name).exists() for name in CHECK["EXEMPT"])
