"""`smq disk`: what an operator does with a stopped node's data directory: facts that nothing on it shows, and copies.

Owns what these commands print. Each goes through the disk that a node would use: its lock protects the directory of a
running node. `cli.root` loads it when it is used; `cli.disk_export` opens a directory as the others do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import done, json_option
from smq.coordinator.user_errors import UserError
from smq.replication.nodes.identity import DISK_KEY, copied_to, not_copied, replace_disk_id
from smq.replication.ports import DataDamaged, Disk, Table
from smq.replication.raft.journal import JournalWriter, RaftJournal
from smq.replication.runtime.asyncio_runtime import SystemRng
from smq.replication.storage.copying import copy_directory
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.index import DATA_FILE
from smq.replication.storage.node_log import LOG_DIRECTORY
from smq.replication.storage.offline import OfflineDisk, OfflineFailed

directory_argument = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


# Its module loads the codecs of records, which the other commands need not wait for.
_LAZY: Final = {"export": "smq.coordinator.cli.disk_export:disk_export"}


@click.group(cls=CommandGroup, lazy=_LAZY)
def disk() -> None:
    """Works on a stopped node's data DIRECTORY: after a restore, to move it, or to save what it holds."""


@disk.command("renew")
@directory_argument
def disk_renew(directory: Path) -> None:
    """Gives DIRECTORY a new disk id: its node rejoins as if its disk had been replaced.

    Use it for a copy that is restored while the other nodes are up, for one node at a time. A majority of renewed
    disks can never rejoin, and there is no way back. A directory that was copied with `smq disk copy` also needs it to
    be used again. The other nodes recognise most old copies by themselves, but not a
    copy made while a node was away that is back now. After this command they need not recognise it. The records in
    DIRECTORY are kept.

    Example: smq disk renew /var/lib/smq
    """
    with opened(directory) as found:
        why = "its operator said that its data directory is an old copy"
        replace_disk_id(found, SystemRng(), why, not_copied(), _nothing)
    click.echo(
        f"{directory} has a new disk id: its node rejoins, and has no vote until the other nodes admit it. Renew no "
        "other directory until `smq status` shows this node ready"
    )


@disk.command("forget")
@directory_argument
@click.confirmation_option(prompt="Were the directories of ALL nodes restored from copies, and are all nodes stopped?")
def disk_forget(directory: Path) -> None:
    """Makes DIRECTORY forget what it knows of the state of other nodes' disks.

    Use it only if all nodes were restored from copies of different moments, and then on each of them: otherwise the
    newest copies would reject the others as old. Records acknowledged after the oldest copies may be lost.

    Example: smq disk forget /var/lib/smq
    """
    with opened(directory) as found:
        journal = RaftJournal()
        for _ in journal.load(found):
            pass  # it pauses for other work, and here there is none
        journal.keep_marks(b"")
        JournalWriter(found, journal, _nothing).flush_marks()
    click.echo(f"{directory} has forgotten what it knew of other nodes' disks")


@disk.command("copy")
@click.argument("source", metavar="FROM", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("to", metavar="TO", type=click.Path(path_type=Path))
@json_option
def disk_copy(source: Path, to: Path, as_json: bool) -> None:
    """Copies the data directory FROM to a new directory TO, such as one on another disk.

    The copy appears under its name when it is complete and has been read again and compared. Until then it is
    TO.copying; if the command is interrupted, run it again. FROM keeps its rows. The copy is the same disk of the same
    node: no node starts on FROM any more, unless `smq disk renew` has made it another disk.

    Example: smq disk copy /var/lib/smq /mnt/new/smq
    """
    _refuse_foreign(source)
    try:
        copied = copy_directory(
            source,
            to,
            lambda what: click.echo(what, err=True),
            copied_to(str(to.absolute())),
        )
    except (DiskOpenError, OfflineFailed, OSError) as e:
        raise UserError(f"nothing was copied: {e}") from e
    done(
        f"{to} holds the {copied.rows} rows of {source}, {copied.size} bytes, SHA-256 {copied.digest}. Now set "
        f'data_dir = "{to}" for this node, start it, and remove {source} once it runs',
        as_json=as_json,
        directory=str(to),
        rows=copied.rows,
        bytes=copied.size,
        sha256=copied.digest,
    )


def _refuse_foreign(directory: Path) -> None:
    """Opening an empty directory would make it a node's."""
    if not (directory / DATA_FILE).exists() and not (directory / LOG_DIRECTORY).exists():
        raise UserError(f"{directory} holds no {DATA_FILE}: name a node's data directory (`data_dir` in node.toml)")


@contextmanager
def opened(directory: Path) -> Iterator[Disk]:
    """The disk; committed and closed after the block. UserError if there is none, it is in use, or it is damaged."""
    _refuse_foreign(directory)
    try:
        with OfflineDisk(directory) as found:
            if found.disk.get(Table.META, DISK_KEY) is None:
                raise UserError(f"{directory} has no disk id: no node has run on it")
            yield found.disk
    except (DiskOpenError, DataDamaged, OfflineFailed) as e:
        raise UserError(str(e)) from e


def _nothing() -> None: ...
