"""Prometheus's text of families with thousands of series, written piece by piece.

Owns the form of a line and the length of a piece. Pure. The modules of the metrics import it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

READ_PER_PIECE: Final = 250  # partitions or commits: less than two milliseconds
LINES_PER_PIECE: Final = 1_000  # about 60 KB, less than a millisecond
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Omitted: TypeAlias = Counter[str]  # what a scrape leaves out, by kind


def family(name: str, text: str, rows: Iterable[tuple[str, float]]) -> Iterator[bytes]:
    left = iter(rows)
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP smq_{name} {text}\n# TYPE smq_{name} {kind}\n"
    while lines := [f"smq_{name}{labels} {value}\n" for labels, value in islice(left, LINES_PER_PIECE)]:
        yield (head + "".join(lines)).encode()
        head = ""
    if head:
        yield head.encode()


def escaped(value: str) -> str:
    return value.translate(_ESCAPES)
