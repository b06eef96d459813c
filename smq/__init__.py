"""smq: a Raft-replicated, partitioned log whose offsets are exact."""

__version__ = "0.2.0"  # the only place: the build and `smq --version` take it from here


def extra_advice(extra: str) -> str:
    """How to install the packages of an extra. The distribution is smq-log: `smq` on the index is another project."""
    return f"pip install '.[{extra}]' in a clone of smq, or its wheel with [{extra}]"
