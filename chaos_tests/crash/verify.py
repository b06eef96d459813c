"""Opens a crash image as a node would, and checks that it holds everything acknowledged.

Owns the verdict on one image. It uses the production store throughout.
"""

import queue
import shutil
from collections.abc import Callable
from pathlib import Path

from chaos_tests.crash.stores import open_store
from chaos_tests.crash.trace import Acked, Image
from chaos_tests.crash.workload import PID, batch, command
from smq.records import CRC_START
from smq.replication.log.store import LogStore
from smq.replication.ports import DataDamaged, Disk
from smq.replication.raft.journal import RaftJournal
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.node_log import LOG_DIRECTORY


def log_and_journal(disk: Disk, acked: Acked) -> str:
    """Empty if everything that `workload` had acknowledged is there; otherwise the problem."""
    return _log_verdict(disk, acked) or _journal_verdict(disk, acked)


def verdict(directory: Path, image: Image, judge: Callable[[Disk, Acked], str] = log_and_journal) -> str:
    """Empty if the image opens and passes; otherwise the problem."""
    directory.mkdir(mode=0o700, exist_ok=True)
    shutil.rmtree(directory / LOG_DIRECTORY, ignore_errors=True)
    for old in directory.iterdir():
        old.unlink()
    (directory / LOG_DIRECTORY).mkdir()
    for name, content in image.files.items():
        (directory / name).write_bytes(content)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    fatal: list[BaseException] = []
    try:
        disk = open_store(directory, call_soon_threadsafe=calls.put, on_fatal=fatal.append)
    except DiskOpenError as e:
        return f"it does not open: {e}"
    try:
        said = judge(disk, image.acked)
    except DataDamaged as e:
        said = f"it is damaged: {e}"
    finally:
        disk.close()
    while not calls.empty():
        calls.get()()
    return said or (f"it fails: {fatal[0]!r}" if fatal else "")


def _log_verdict(disk: Disk, acked: Acked) -> str:
    log = LogStore(disk).open_all().get(PID)
    if log is None:
        return "the partition is missing"
    if log.tail_damage is not None or log.damaged_batches:
        return f"the log is damaged: {log.tail_damage or log.damaged_batches}"
    if log.durable_end < acked.log_end or log.log_start < acked.log_start:
        return f"the log is {log!r}, but {acked} was acknowledged"
    at = log.log_start
    while found := log.read(at, log.durable_end, 1 << 20):
        for stored in found:
            if bytes(stored.batch[CRC_START:]) != batch(stored.base)[CRC_START:]:
                return f"offset {stored.base} holds another batch"
        at = found[-1].end
    return "" if at == log.durable_end else f"the log cannot be read from {at} on"


def _journal_verdict(disk: Disk, acked: Acked) -> str:
    journal = RaftJournal()
    for _ in journal.load(disk):
        pass
    if not len(journal) or journal.last_index < acked.journal_index:
        return f"the journal is too short: {acked} was acknowledged"
    wrong = [index for entry, index, _ in journal.entries_from(1, count_max=1 << 30) if entry != command(index)]
    return f"the journal holds another entry at {wrong[0]}" if wrong else ""
