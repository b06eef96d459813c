"""Sizes, ages and totals of lag as a person reads them, the same in the command line and in the console.

Owns their form: what is not known is a dash or "or more", never zero. Pure. `cli` and the console import it.
"""

from collections.abc import Callable

from smq.clients.lag import LagTotal, Total


def number_text(value: int | None) -> str:
    """1,234; a dash if it is not known."""
    return f"{value:,}" if value is not None else "-"


def size_text(size: int | None) -> str:
    """12 B, 3.4 KiB; a dash if it is not known."""
    if size is None:
        return "-"
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def age_text(ms: int | None) -> str:
    """0 s, 12 s, 3 m 20 s, 5 h 10 m, 30 d 2 h; a dash if it is not known."""
    if ms is None:
        return "-"
    seconds = ms // 1_000
    for unit, smaller, size, part in (("d", "h", 86_400, 3_600), ("h", "m", 3_600, 60), ("m", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller}"
    return f"{seconds} s" if seconds or not ms else f"{ms} ms"


def lag_texts(total: LagTotal) -> tuple[str, str, str, str]:
    """Offsets, records, bytes and time. "12 or more" if a part is not known."""
    return (
        _total_text(total.offsets, number_text),
        _total_text(total.records, number_text),
        _total_text(total.size_bytes, size_text),
        _total_text(total.age_ms, age_text),
    )


def _total_text(total: Total, text: Callable[[int | None], str]) -> str:
    if total.is_known:
        return text(total.at_least)
    return f"{text(total.at_least)} or more" if total.at_least else text(None)
