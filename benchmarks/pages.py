"""docs/performance.md: the text between two marks, and the pictures and results kept beside it.

Owns docs/performance/. It must never measure: what it writes comes from a run's results.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = DOCS / "performance.md"
KEPT: Final = DOCS / "performance"


def rewrite(name: str, command: str, text: str, *, picture: str | None, results: Any) -> None:
    """Replaces the part of the page that `command` writes, its picture if it has one, and its JSON file."""
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    if picture is not None:
        (KEPT / f"{name}.svg").write_text(picture)
    begin, end = f"<!-- {name}: written by `{command}` -->", f"<!-- /{name} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE} has no part between {begin} and {end}")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@overload
def blank(width: float, height: float) -> "tuple[Figure, Axes]": ...
@overload
def blank(width: float, height: float, *, columns: int) -> "tuple[Figure, Sequence[Axes]]": ...
def blank(width: float, height: float, *, columns: int = 1) -> "tuple[Figure, Any]":
    """To draw on, in inches; `columns` of axes side by side. The same drawing gives the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "smq"
    from matplotlib import pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height))


def svg(figure: "Figure") -> str:
    from matplotlib import pyplot as plt

    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
