"""Writes the pages of docs that come from code: `python -m docs.generate`, which `make docs` runs.

Owns what the pages have in common: a module per page, of the page's name, whose `render` gives the whole page, and
Markdown's tables. A module must never read what is not in the repository, or tests/unit/test_repository.py, which fails
if a committed page is not what its module renders, would fail elsewhere. Only `make docs` and tests import it.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = DOCS.parent
GUIDES: Final = ("groups", "kafka")


def names() -> list[str]:
    """The pages, each by its module's name."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "__main__")


def page_of(name: str) -> Path:
    """Where the page of a module lies: beside the guides if it is one, otherwise in the reference."""
    return (DOCS if name in GUIDES else DOCS / "reference") / f"{name}.md"


def rendered(name: str) -> str:
    """The whole of a page."""
    render: Callable[[], str] = importlib.import_module(f"{__name__}.{name}").render
    return render()


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table, with its line end. Its cells are Markdown without a bar (see `cell`)."""
    titles = list(head)
    lines = [f"| {' | '.join(row)} |\n" for row in (titles, *rows)]
    return "".join([lines[0], f"|{'---|' * len(titles)}\n", *lines[1:]])


def cell(text: str) -> str:
    """A text for a cell: on one line, and with its bars escaped, in code as well."""
    return escaped(" ".join(text.split())).replace("|", "\\|")


def escaped(text: str) -> str:
    """A text that is no Markdown, although it may hold code: what Markdown would take for its own stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"[*<]", r"\\\g<0>", piece) for piece in pieces)
