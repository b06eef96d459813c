"""The version of the on-disk format: the log's frames, the index's tables, their keys and their values.

Owns the number, and the refusal of another one and of what earlier versions left. It must never read or write a file.
"""

from pathlib import Path
from typing import Final

from smq.replication.storage.directory import FormatUnsupported

FORMAT_VERSION: Final = 4
FORMAT_KEY: Final = b"format_version"  # of table meta
FORMAT_BYTES: Final = 4
_OLD_FILES: Final = ("data.wal", "data.sqlite3")
_ADVICE: Final = (
    "use the version that wrote it, or move the directory away and start with an empty one while the others are up"
)


def refuse_old_files(path: Path) -> None:
    """FormatUnsupported if the directory holds files of an earlier format."""
    for name in _OLD_FILES:
        if (path / name).exists():
            raise FormatUnsupported(
                f"{path} holds {name}, of an earlier on-disk format; this version of smq reads format "
                f"{FORMAT_VERSION}: {_ADVICE}"
            )


def check_format(path: Path, found: bytes) -> None:
    """FormatUnsupported for another version than ours."""
    version = int.from_bytes(found, "big")
    if version != FORMAT_VERSION:
        raise FormatUnsupported(
            f"{path} has on-disk format {version}, this version of smq reads format {FORMAT_VERSION}: {_ADVICE}"
        )
