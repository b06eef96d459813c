"""The index of a node that is stopped, for tests that look into it or change it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from smq.replication.storage.directory import DirectoryInUse
from smq.replication.storage.disk import NodeLogDisk
from smq.testing.node_process import wait_for


def environment(data_dir: Path) -> Path:
    """The directory of the node's index."""
    (found,) = data_dir.rglob("data.mdb")
    return found.parent


@contextmanager
def opened(data_dir: Path) -> Iterator[lmdb.Environment]:
    """With everything that the node has written: a killed one leaves some in its log alone."""
    directory = environment(data_dir)
    wait_for("the process has given up the directory", lambda: _is_settled(directory))
    with lmdb.open(str(directory), max_dbs=16, map_size=1 << 40) as env:
        yield env


def _is_settled(directory: Path) -> bool:
    try:
        NodeLogDisk(directory, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None).close()
    except DirectoryInUse:  # a thread of a process that was killed still waits for the disk
        return False
    return True
