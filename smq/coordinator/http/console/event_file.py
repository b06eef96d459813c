"""The events of the time line in a file of the data directory, so that a node which was killed still shows them.

Owns the file: one line of JSON for each event, behind the CRC of that line. It is bounded: twice the events that are
kept, and then it is written again. It is an aid to the reader and no part of the data: a line that is damaged is left
out, a file that cannot be written costs the node nothing, and nothing is synced. Its methods block: call them off the
loop. `events` imports it.
"""

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

FILE: Final = "events.log"
EVENTS_MAX: Final = 1_000  # 200 bytes each; days of a healthy cluster
_FILE_BYTES_MAX: Final = 16 << 20  # far more than it ever has: a larger one is not ours
_TEXT_CHARS_MAX: Final = 2_000

_log = logging.getLogger("smq.events")


class Event(NamedTuple):
    at_s: float  # Unix time, as this node saw it
    kind: str
    text: str


class EventFile:
    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._lines = 0
        self._has_failed = False

    def load(self) -> tuple[list[Event], int]:
        """The last events, and how many lines are damaged."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    lines = file.read(_FILE_BYTES_MAX).splitlines()
            except FileNotFoundError:
                return [], 0
            except OSError as e:
                self._failed(e)
                return [], 0
            read = [_parsed(line) for line in lines]
            events = [event for event in read if event is not None][-EVENTS_MAX:]
            damaged = sum(event is None for event in read)
            self._lines = len(lines)
            if damaged:
                self._rewrite(events)  # whatever follows a torn line would be part of it
            return events, damaged

    def add(self, new: Sequence[Event], kept: Iterable[Event]) -> None:
        """Appends `new`, or writes what is `kept`, which includes it, once the file has grown too long."""
        with self._lock:
            try:
                if self._lines + len(new) > 2 * EVENTS_MAX:
                    self._rewrite(kept)
                    return
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "ab") as file:
                    file.write(b"".join(map(_line, new)))
                self._lines += len(new)
            except OSError as e:
                self._failed(e)

    def _rewrite(self, events: Iterable[Event]) -> None:
        lines = list(map(_line, events))
        other = self._path.with_suffix(".new")
        try:
            descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"".join(lines))
            other.replace(self._path)
            self._lines = len(lines)
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        """Once per process: a full disk would otherwise fill the log, too."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("events are not kept in %s: %s", self._path, error.strerror or error)


def _line(event: Event) -> bytes:
    written = json.dumps([event.at_s, event.kind, event.text[:_TEXT_CHARS_MAX]]).encode()
    return b"%08x %s\n" % (zlib.crc32(written), written)


def _parsed(line: bytes) -> Event | None:
    crc, _, written = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(written):
        return None
    try:
        at_s, kind, text = json.loads(written)
        return Event(float(at_s), str(kind), str(text))
    except (ValueError, TypeError, RecursionError):
        return None
