"""Sizes and ages as a person reads them, the same in the command line and in the console.

Owns their form. Pure. `cli` and the console import it.
"""


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
