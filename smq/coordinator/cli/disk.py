"""`smq disk`: says of a stopped node's data directory what nobody else can know.

Owns the commands' words. They change one row each, through the disk that a node would use, whose lock keeps a running
node's directory out of reach. `cli` loads it when it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from smq.coordinator.user_errors import UserError
from smq.replication.membership.identity import DISK_KEY, replace_disk_id
from smq.replication.ports import DataDamaged, Table
from smq.replication.raft.journal import RaftJournal
from smq.replication.runtime.asyncio_runtime import SystemRng
from smq.replication.storage.disk_lmdb import DATA_FILE, DiskOpenError, LmdbDisk

_directory = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group()
def disk() -> None:
    """Works on the data DIRECTORY of a node that is stopped, after it was put back from a copy."""


@disk.command("renew")
@_directory
def disk_renew(directory: Path) -> None:
    """Makes DIRECTORY another disk: its node rejoins as one whose disk was replaced.

    For a copy that is put back while the other nodes are up, of one node at a time: a majority of such disks is let in
    by nobody, and there is no way back. They tell old copies by themselves, but for those made while a node was away
    that is back now: with this nobody has to tell. The records in it are kept."""
    with _opened(directory) as opened:
        replace_disk_id(opened, SystemRng(), "its operator said that its data directory is an old copy", [], _nothing)
    click.echo(
        f"{directory} is another disk now: its node rejoins, and has no vote until the others let it in. Do this to no "
        "other directory before `smq status` shows this node ready"
    )


@disk.command("forget")
@_directory
@click.confirmation_option(prompt="Are the directories of ALL nodes put back from copies, and their nodes stopped?")
def disk_forget(directory: Path) -> None:
    """Makes DIRECTORY forget what the disks of other nodes had said that they remember.

    Only where all nodes were put back from copies of different moments, and on each of them: the newest copies would
    else tell the others that they are old. What was acknowledged after the oldest copies may be lost."""
    with _opened(directory) as opened:
        journal = RaftJournal(opened, _nothing)
        for _ in journal.load():
            pass  # nobody is kept waiting
        journal.keep_marks(b"")
        journal.flush_marks()
    click.echo(f"{directory} has forgotten what other nodes' disks remember")


@contextmanager
def _opened(directory: Path) -> Iterator[LmdbDisk]:
    """The disk; committed and closed behind it. UserError where it is not one, is in use, or is damaged."""
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
