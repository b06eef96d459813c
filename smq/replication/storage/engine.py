"""Which store a data directory has: LMDB or SQLite.

Owns the engines' names, by which `storage_engine` chooses one, the file by which a directory is recognised, and the
refusal of a directory that another engine has made. It must never look into a file, and imports no store.
"""

import enum
from pathlib import Path
from typing import Final, Protocol

from smq.replication.storage.directory import DiskOpenError


class StoreName(Protocol):
    """What a store's class says of itself. `str()` of it is its name."""

    @property
    def data_file(self) -> str: ...


class Engine(enum.StrEnum):
    """The stores that `storage_engine` may name."""

    LMDB = "lmdb"
    SQLITE = "sqlite"

    @property
    def data_file(self) -> str:
        return _DATA_FILES[self]


_DATA_FILES: Final = {Engine.LMDB: "data.mdb", Engine.SQLITE: "data.sqlite3"}


class WrongEngine(DiskOpenError):
    """Another engine has made the directory."""


def engine_of(path: Path) -> Engine | None:
    """The engine that has made the directory; None if none has. Raises DiskOpenError if two have."""
    found = [engine for engine in Engine if (path / engine.data_file).exists()]
    if len(found) > 1:
        files = " and ".join(engine.data_file for engine in found)
        raise DiskOpenError(
            f"data directory {path} holds {files}, of two storage engines: move the one that is not this node's to a "
            "directory of its own, with its other files. If you do not know which one it is, move the whole directory "
            "away and start the node with an empty one while the others are up"
        )
    return found[0] if found else None


def refuse_other_engine(path: Path, engine: StoreName) -> None:
    """WrongEngine if another engine's data file is there. Raises DiskOpenError if there are two."""
    found = engine_of(path)
    if found is None or found is engine:
        return
    raise WrongEngine(
        f"data directory {path} was made by storage engine {found}, not by {engine}: set storage_engine = "
        f'"{found}", or copy it while the node is stopped: smq disk copy {path} NEW_DIRECTORY --engine {engine}'
    )
