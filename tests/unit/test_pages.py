"""Every code block of the pages is run by a test, or says why not."""

import re

import pytest

from tests.pages import ROOT, Block, blocks, blocks_of, missing, pages


def unmarked(found: list[Block]) -> list[int]:
    return [block.line for block in found if not block.run_by and not block.not_run and block.language != "text"]


def test_every_block_is_run_by_a_test_or_says_why_not() -> None:
    assert {page: lines for page in pages() if (lines := unmarked(blocks(page)))} == {}


def test_the_tests_that_are_named_take_the_blocks_of_their_page() -> None:
    for page in pages():
        for block in blocks(page):
            if block.run_by is not None:
                source = (ROOT / block.run_by).read_text(encoding="utf-8")
                taken = re.search(rf'claimed\(\s*"{re.escape(page)}"', source) or f'"{page}"' in source
                assert taken, f"{page}:{block.line} says that {block.run_by} runs it, which does not take that page"
                assert "claimed(" in source, block.run_by


@pytest.mark.parametrize("page", pages())
def test_every_file_that_a_mark_names_exists(page: str) -> None:
    assert [name for block in blocks(page) for name in missing(block)] == []


@pytest.mark.parametrize(
    ("mark", "names"),
    [
        ("not run: it needs podman; tests/deploy/test_images.py builds the image", ["tests/deploy/test_images.py"]),
        ("run by tests/unit/test_nothing.py", ["tests/unit/test_nothing.py"]),
        ("not run: it takes minutes; tests/simulation runs it on fewer seeds", ["tests/simulation"]),
        ("not run: it takes minutes; tests/sim and tests/unit/test_pages.py, too", []),
        ("run by tests/unit/test_pages.py", []),
    ],
)
def test_a_mark_that_names_a_missing_file_is_found(mark: str, names: list[str]) -> None:
    [block] = blocks_of(f"<!-- {mark} -->\n```sh\nls\n```\n")
    assert missing(block) == names


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("A page.\n\n```sh\nls\n```\n", [3]),
        ("A page.\n\n    ls\n", [3]),
        ("<!-- not run:  -->\n```sh\nls\n```\n", [2]),
        ("<!-- not run: it needs a moon -->\n\nAnd then:\n\n```sh\nls\n```\n", [5]),
        ("<!-- not run: it needs a moon -->\n```sh\nls\n```\n\n```sh\nls\n```\n", [6]),
        ("1. A list\n\n   ```sh\n   ls\n   ```\n", [3]),
        ("<!-- not run: it needs a moon -->\n```sh\nls\n```\n", []),
        ("<!-- run by tests/x.py -->\n```python\n1\n```\n", []),
        ("<!-- all blocks are run by tests/x.py -->\n\n# Title\n\n```python\n1\n```\n", []),
        ("```text\noutput\n```\n", []),
    ],
)
def test_a_block_that_says_neither_is_found(text: str, lines: list[int]) -> None:
    assert unmarked(list(blocks_of(text))) == lines


def test_every_example_is_in_the_table_with_a_test_that_runs_it() -> None:
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| .+ \| `(tests/[^`]+)`(?: \(full\))? \|$", page, re.MULTILINE)
    folder = ROOT / "examples"
    found = {path.name for path in folder.iterdir()} - {"kafka", "README.md", "__init__.py", "__pycache__"}
    found |= {f"kafka/{path.name}" for path in (folder / "kafka").iterdir() if not path.name.startswith("__")}
    assert {name for name, _ in rows} == found
    for name, test in rows:
        stem = name.removesuffix(".py").partition("/")[0]
        assert re.search(rf"examples[/.]{stem}\b", (ROOT / test).read_text(encoding="utf-8")), (name, test)
    named = re.findall(r"`(tests/\S+)`", page)
    assert [test for test in named if not (ROOT / test).is_file()] == []
