"""`smq disk`: records facts about a stopped node's data directory that only its operator can know.

Owns what these commands print. Each changes one row, through the disk that a node would use: its lock protects the
directory of a running node. `cli.root` loads it when it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.user_errors import UserError
from smq.replication.membership.identity import DISK_KEY, replace_disk_id
from smq.replication.ports import DataDamaged, Table
from smq.replication.raft.journal import RaftJournal
from smq.replication.raft.writer import JournalWriter
from smq.replication.runtime.asyncio_runtime import SystemRng
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.environment_lmdb import DATA_FILE

_directory = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(cls=CommandGroup)
def disk() -> None:
    """Works on the data DIRECTORY of a stopped node, after it was restored from a copy."""


@disk.command("renew")
@_directory
def disk_renew(directory: Path) -> None:
    """Gives DIRECTORY a new disk id: its node rejoins as if its disk had been replaced.

    Use it for a copy that is restored while the other nodes are up, for one node at a time. A majority of renewed
    disks can never rejoin, and there is no way back. The other nodes recognise most old copies by themselves, but not a
    copy made while a node was away that is back now. After this command they need not recognise it. The records in
    DIRECTORY are kept.

    Example: smq disk renew /var/lib/smq
    """
    with _opened(directory) as opened:
        replace_disk_id(opened, SystemRng(), "its operator said that its data directory is an old copy", [], _nothing)
    click.echo(
        f"{directory} has a new disk id: its node rejoins, and has no vote until the other nodes admit it. Renew no "
        "other directory until `smq status` shows this node ready"
    )


@disk.command("forget")
@_directory
@click.confirmation_option(prompt="Were the directories of ALL nodes restored from copies, and are all nodes stopped?")
def disk_forget(directory: Path) -> None:
    """Makes DIRECTORY forget what it knows of the state of other nodes' disks.

    Use it only if all nodes were restored from copies of different moments, and then on each of them: otherwise the
    newest copies would reject the others as old. Records acknowledged after the oldest copies may be lost.

    Example: smq disk forget /var/lib/smq
    """
    with _opened(directory) as opened:
        journal = RaftJournal()
        for _ in journal.load(opened):
            pass  # it pauses for other work, and here there is none
        journal.keep_marks(b"")
        JournalWriter(opened, journal, _nothing).flush_marks()
    click.echo(f"{directory} has forgotten what it knew of other nodes' disks")


@contextmanager
def _opened(directory: Path) -> Iterator[LmdbDisk]:
    """The disk; committed and closed after the block. UserError if there is none, it is in use, or it is damaged."""
    if not (directory / DATA_FILE).is_file():
        raise UserError(f"{directory} holds no {DATA_FILE}: name a node's data directory (`data_dir` in node.toml)")
    failures: list[BaseException] = []
    calls: SimpleQueue[Any] = SimpleQueue()  # the disk's reports to a node's loop
    try:
        opened = LmdbDisk(directory, call_soon_threadsafe=calls.put, on_fatal=failures.append)
    except DiskOpenError as e:
        raise UserError(str(e)) from e
    try:
        if opened.get(Table.META, DISK_KEY) is None:
            raise UserError(f"{directory} has no disk id: no node has run on it")
        yield opened
    except DataDamaged as e:
        raise UserError(str(e)) from e
    finally:
        opened.close()
        while not calls.empty():
            calls.get()()
    if failures:
        raise UserError(f"{directory} could not be written: {failures[0]}")


def _nothing() -> None: ...
