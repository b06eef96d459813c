"""Tables as text: aligned columns, whole cells. A narrow terminal wraps a line; no cell is ever cut.

Owns the layout. Not rich's tables: they cut addresses at the terminal's width, frames disturb `grep` and `awk`, and
their import takes a fifth of a short command's time. Commands import it.
"""

import unicodedata
from typing import Final

import click

_GAP: Final = "  "
_NO_VALUE: Final = "-"


class Table:
    """Columns of numbers are aligned to the right."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def lines(self) -> list[str]:
        table = [self._columns, *self._rows]
        widths = [max(_width(row[i]) for row in table) for i in range(len(self._columns))]
        numeric = [all(_is_number(row[i]) for row in self._rows) for i in range(len(self._columns))]
        return [
            _GAP.join(_padded(c, w, is_right=n) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()
            for row in table
        ]


def print_table(table: Table) -> None:
    for line in table.lines():
        click.echo(line)


def _is_number(cell: str) -> bool:
    return cell in ("", _NO_VALUE) or cell.replace(",", "").removeprefix("-").isdecimal()


def _width(cell: str) -> int:
    """In columns of a terminal: an East Asian wide character has two, a combining one none."""
    if cell.isascii():
        return len(cell)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in cell)
    return len(cell) + wide - sum(unicodedata.combining(c) > 0 for c in cell)


def _padded(cell: str, width: int, *, is_right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if is_right else cell + space
