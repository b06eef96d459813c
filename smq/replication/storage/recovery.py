"""A start: the index gets the rounds that only the log has, and the log a place for the next one.

Owns what a crash may leave, in any phase, and what is damage. Replaying again changes nothing: the index names the
place up to which it has everything, in the transaction that takes the rounds. A damaged or missing index is made again
if the log still has every round from the first on. Only the real disk imports it.
"""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from smq.replication.storage.directory import REPLACE_ADVICE, DiskOpenError, sync_directory
from smq.replication.storage.index import DATA_FILE, INDEX_ERRORS, LOCK_FILE, Index, IndexDamaged, unreadable
from smq.replication.storage.node_log import LogDamaged, NodeLog
from smq.replication.storage.overlay import Layer

DAMAGED: Final = ".damaged"  # after the name of an index that was made again


def open_index(path: Path, log: NodeLog, *, readers: int) -> Index:
    """The index with everything that the log has; the log is ready for the next round. Raises DiskOpenError."""
    try:
        with ExitStack() as failing:
            index = _usable_index(path, log, readers)
            failing.callback(index.close)
            _begin(index, log, path)
            _replay(index, log)
            failing.pop_all()
    except IndexDamaged as e:
        raise DiskOpenError(f"{e}, and the log no longer has everything. {REPLACE_ADVICE}") from e
    except OSError as e:
        raise DiskOpenError(f"{log.path} cannot be written: {e.strerror}. If the disk is full, free space on it") from e
    except INDEX_ERRORS as e:
        raise DiskOpenError(
            f"{path / DATA_FILE} cannot take the rounds of the log: {e}. If the disk is full, free space on it. If the "
            f"file is damaged: {REPLACE_ADVICE}"
        ) from e
    return index


def _usable_index(path: Path, log: NodeLog, readers: int) -> Index:
    try:
        if why := unreadable(path):
            raise IndexDamaged(why)
        return Index(path, readers=readers)
    except IndexDamaged as e:
        if not _has_everything(log):
            raise
        (path / DATA_FILE).rename(path / (DATA_FILE + DAMAGED))
        with suppress(FileNotFoundError):
            (path / LOCK_FILE).unlink()
        sync_directory(path)
        index = Index(path, readers=readers)
        index.remark = f"the index was made again from the log: {e}"
        return index


def _has_everything(log: NodeLog) -> bool:
    first = log.first_place()
    if first is None:
        return False
    try:
        for _ in log.rounds_from(first):
            pass
    except LogDamaged:
        return False
    return True


def _begin(index: Index, log: NodeLog, path: Path) -> None:
    """Of a new index: the place where the log began, or begins."""
    if index.place is not None:
        return
    if not log.is_begun():
        index.set_place(log.begin(1), is_clean=True)
    elif _has_everything(log) and (first := log.first_place()) is not None:
        index.set_place(first)
    else:
        raise DiskOpenError(
            f"{path / DATA_FILE} is missing or new, and {log.path} no longer has everything. If the directory was "
            f"copied, copy all its files. Otherwise: {REPLACE_ADVICE}"
        )


def _replay(index: Index, log: NodeLog) -> None:
    place = index.place
    assert place is not None
    log.live_bytes = sum(index.live.values())
    layer = Layer(place)
    for changes, after in log.rounds_from(place):
        layer.add(changes, after, 0)
        if layer.is_full:
            index.apply(layer)
            layer = Layer(after)
    if layer.end != index.place:
        index.apply(layer)
    log.give_back_ahead(layer.end)
    if index.is_clean:  # nothing was written after it, not even in part
        log.resume(place)
        index.set_place(place)
    else:
        index.set_place(log.close_torn(layer.end))
