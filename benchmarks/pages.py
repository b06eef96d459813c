"""docs/performance.md: the text between two marks, and the pictures and results kept beside it.

Owns docs/performance/. It must never measure: what it writes comes from a run's results.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = DOCS / "performance.md"
KEPT: Final = DOCS / "performance"


def rewrite(name: str, command: str, text: str, *, picture: str, results: Any) -> None:
    """Replaces the part of the page that `command` writes, its picture and its JSON file."""
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
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


def blank(width: float, height: float) -> "tuple[Figure, Axes]":
    """To draw on. The same drawing gives the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "smq"
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height))


def svg(figure: "Figure") -> str:
    from matplotlib import pyplot as plt

    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
