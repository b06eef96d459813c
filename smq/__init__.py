"""smq: a Raft-replicated, partitioned log whose offsets are exact."""


def extra_advice(extra: str) -> str:
    """How to install the packages of an extra. Not from PyPI, where `smq` is another project."""
    return f"pip install '.[{extra}]' in a clone of smq, or its wheel with [{extra}]"
