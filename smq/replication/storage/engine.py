"""Which store a data directory has: LMDB or SQLite.

Owns the engines' names, by which `storage_engine` chooses one, the file by which a directory is recognised, and the
refusal of a directory that another engine has made. It must never look into a file, and imports no store.
"""

import enum
from pathlib import Path
from typing import Final

from smq.replication.storage.directory import DiskOpenError


class Engine(enum.StrEnum):
    LMDB = "lmdb"
    SQLITE = "sqlite"

    @property
    def data_file(self) -> str:
        return _DATA_FILES[self]


_DATA_FILES: Final = {Engine.LMDB: "data.mdb", Engine.SQLITE: "data.sqlite3"}


class WrongEngine(DiskOpenError):
    """Another engine has made the directory."""


def engine_of(path: Path) -> Engine | None:
    """The engine that has made the directory; None if none has."""
    return next((engine for engine in Engine if (path / engine.data_file).exists()), None)


def refuse_other_engine(path: Path, engine: Engine) -> None:
    """WrongEngine if there is a data file, and only another engine's."""
    found = engine_of(path)
    if found is None or (path / engine.data_file).exists():
        return
    raise WrongEngine(
        f"data directory {path} was made by storage engine {found}, not by {engine}: set storage_engine = "
        f'"{found}", or copy it while the node is stopped: smq disk copy {path} NEW_DIRECTORY --engine {engine}'
    )
