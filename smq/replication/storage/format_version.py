"""The version of the on-disk format, the same for every store: the tables, their keys and their values.

Owns its row, the rows of a new directory, and the refusal of another version. It must never read or write a file.
"""

from pathlib import Path
from typing import Final

from smq.replication.storage.directory import FormatUnsupported
from smq.replication.storage.write_ahead import WRITE_AHEAD_KEY, Active

FORMAT_VERSION: Final = 2
FORMAT_KEY: Final = b"format_version"
_FORMAT_BYTES: Final = 4


def first_rows(write_ahead_bytes: int) -> dict[bytes, bytes]:
    """Of table meta."""
    return {
        FORMAT_KEY: FORMAT_VERSION.to_bytes(_FORMAT_BYTES, "big"),
        WRITE_AHEAD_KEY: Active(write_ahead_bytes, b"", b"").encode(),
    }


def check_format(path: Path, found: bytes) -> None:
    """FormatUnsupported for another version than ours."""
    version = int.from_bytes(found, "big")
    if version != FORMAT_VERSION:
        raise FormatUnsupported(
            f"{path} has on-disk format {version}, this version of smq reads format {FORMAT_VERSION}: use the version "
            "that wrote it, or move the directory away and start with an empty one while the others are up"
        )
