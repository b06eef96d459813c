"""docs/reference/tree.md from the docstrings of packages and modules, so that the map cannot differ from the tree.

Owns the choice of what is listed: every package but the tests and generated stubs, with the first sentence of each
docstring.
"""

import ast
import re
from pathlib import Path
from typing import Final

from docs.generate import ROOT

TOPS: Final = ("smq", "pyspark_smq", "chaos_tests", "benchmarks", "examples")
GENERATED: Final = ("smq/clients/pb",)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+(?=[\"'`(]?[A-Z])")

_HEAD: Final = """\
# What each file does

Generated from docstrings by `make docs`; do not edit. Each line is the first sentence of a module; open the file for
what it owns, what it must never do, and which modules may import it. ARCHITECTURE.md has the reasons.
"""


def render() -> str:
    """A heading per room, a line per file."""
    skipped = {ROOT / name for name in GENERATED}
    rooms = [room for top in TOPS for room in sorted({file.parent for file in (ROOT / top).rglob("*.py")} - skipped)]
    return _HEAD + "".join(_room(room) for room in rooms)


def _room(room: Path) -> str:
    files = sorted(file for file in room.glob("*.py") if file.name != "__init__.py")
    lines = [f"- `{file.name}`: {_first_sentence(file)}" for file in files]
    heading = f"\n## {room.relative_to(ROOT).as_posix()}\n\n{_first_sentence(room / '__init__.py')}\n"
    return heading + ("\n" + "\n".join(lines) + "\n" if lines else "")


def _first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph, maxsplit=1)[0]
