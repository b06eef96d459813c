"""The data directory: its permissions, its lock, and the errors that refuse it.

Owns everything about the directory that is no store's business. It must never look into a file other than the lock.
The real disk imports it, and every caller that opens one, for its errors.
"""

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

REPLACE_ADVICE: Final = (
    "Move the directory away and start the node with an empty one while the others are up; they hold every "
    "acknowledged record"
)
LOCK_FILE: Final = "smq.lock"
FIRST_START_FILE: Final = "first-start"  # an operator wants a new cluster, and this empty directory to be of it
USER_FILE: Final = "user-to-set"  # an operator wants this user's password set when the node next starts
DIRECTORY_MODE: Final = 0o700
PARENT_MODE: Final = 0o777  # less the process's umask, as `mkdir -p` has it
FILE_MODE: Final = 0o600


class DiskOpenError(Exception):
    """The data directory cannot be used; the message says why and what to do."""


class DirectoryInUse(DiskOpenError):
    """Another process holds the directory."""


class FormatUnsupported(DiskOpenError):
    """The directory was written by another version, or is not smq's."""


def is_used(path: Path) -> bool:
    """Whether a process has ever opened the directory, so that one may have it open now."""
    try:
        return (path / LOCK_FILE).exists()
    except PermissionError:
        return False  # `make_directory` says why


def make_directory(path: Path) -> None:
    """Creates the directory, or tightens the permissions of an existing one. Its name is durable afterwards."""
    try:
        _make(path, DIRECTORY_MODE)
        if stat.S_IMODE(path.stat().st_mode) != DIRECTORY_MODE:
            path.chmod(DIRECTORY_MODE)
    except OSError as e:
        raise DiskOpenError(f"data directory {path} cannot be used: {e.strerror}{_advice(path)}") from e


def _make(path: Path, mode: int) -> None:
    """A name is synced before anything is made below it. That of an existing directory is synced, too: an earlier
    start may have made it, and crashed before it was durable."""
    is_new = not path.exists()
    if is_new:
        _make(path.parent, PARENT_MODE)
    path.mkdir(mode=mode, exist_ok=True)
    if path.stat().st_dev != path.parent.stat().st_dev:
        return  # a volume is mounted there: this process has not made it
    try:
        sync_directory(path.parent)
    except PermissionError:
        if is_new:
            raise  # otherwise the parent's owner has probably made the directory in it


def _advice(path: Path) -> str:
    """Whose directory it is, and what to do: typically a volume that was mounted for another user."""
    for found in (path, *path.parents):
        try:
            owner = found.stat().st_uid
        except OSError:
            continue  # it does not exist, or may not be seen
        if owner != os.geteuid():
            return (
                f". {found} belongs to user {owner}, and this process is user {os.geteuid()}: give it to that user "
                "(chown), or name a directory in it that this user may make (data_dir)"
            )
        break
    return "; choose a directory that this user owns, and correct the modes of its files"


def sync_directory(path: Path) -> None:
    """Makes the names in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_directory(path: Path) -> int:
    """The descriptor of the lock file; the lock ends with the process, however that ends."""
    try:
        fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as e:
        raise DiskOpenError(f"{path / LOCK_FILE} cannot be opened: {e.strerror}{_advice(path)}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        owner = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DirectoryInUse(
            f"data directory {path} is in use by process {owner}: stop that node first, or choose another directory"
        ) from e
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
