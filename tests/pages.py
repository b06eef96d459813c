"""The code blocks of the pages: each says in a comment before it which test runs it, or why none does.

    <!-- run by tests/cluster/pages/test_readme.py -->
    <!-- not run: it needs kubectl -->

`<!-- all blocks are run by FILE -->` stands for all blocks of its page. Blocks of `text` are output, or a drawing: they
need no comment. A test gets its blocks by `claimed`, and so exactly those that the page gives it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).resolve().parents[1]
_ALL: Final = re.compile(r"<!-- all blocks are run by (\S+) -->")
_RUN: Final = re.compile(r"<!-- run by (\S+) -->")
_NOT_RUN: Final = re.compile(r"<!-- not run: (\S.*?) -->")
_PATH: Final = re.compile(r"\b[a-z]\w*(?:/[\w-]+)+(?:\.\w+)?")


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    language: str  # empty if it is not fenced, or names none
    text: str
    run_by: str | None
    not_run: str | None


def pages() -> list[str]:
    """Those with blocks that a reader may type."""
    found = [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/decisions/*.md"),
        *ROOT.glob("docs/reference/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> list[Block]:
    return list(blocks_of((ROOT / page).read_text(encoding="utf-8")))


def blocks_of(text: str) -> Iterator[Block]:
    of_all = _ALL.search(text)
    before = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            run_by, not_run = _RUN.search(before) or of_all, _NOT_RUN.search(before)
            yield Block(
                token.map[0] + 1 if token.map else 0,
                token.info.strip(),
                token.content,
                None if run_by is None or not_run else run_by[1],
                None if not_run is None else not_run[1],
            )
        before = token.content if token.type == "html_block" else ""


def missing(block: Block) -> list[str]:
    """The files and folders of the repository that the block's mark names, and that do not exist."""
    named = _PATH.findall(f"{block.run_by or ''} {block.not_run or ''}")
    return [name for name in named if not (ROOT / name).exists()]


def claimed(page: str, test: str) -> list[str]:
    """The blocks of a page (by its path in the repository) that the test runs, which gives its `__file__`."""
    name = str(Path(test).resolve().relative_to(ROOT))
    return [block.text for block in blocks(page) if block.run_by == name]
