"""Who changed the cluster through this node, or was refused: a file of JSON lines.

Owns the lines and the files that they are in: at most `files`, of `file_bytes_max` each. Every port reports to it where
it has decided about a request and has its outcome. It must never write on the event loop, hold up a request, or get a
request's body: the ports name what a request was about, which is never a password or a key.
"""

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog

from smq.coordinator.limits import (
    AUDIT_LINES_WAITING_MAX,
    AUDIT_NAMES_MAX,
    AUDIT_REFUSALS_MAX,
    AUDIT_REFUSED_BYTES_PER_MINUTE_MAX,
    AUDIT_TEXT_CHARS_MAX,
)
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.topic_config import TOPIC_CONFIG

log = structlog.get_logger(__name__)

FILE_NAME: Final = "audit.jsonl"
_MINUTE_S: Final = 60.0
_REFUSED: Final = "refused"
_MODE: Final = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Of a request. The user is "" where a port asks for none."""

    user: str
    address: str
    port: str  # kafka, grpc, http
    listener: str


class Audit:
    """Without a path it writes nothing."""

    def __init__(self, path: Path | None = None, *, file_bytes_max: int = 0, files: int = 0) -> None:
        self._path = path if files else None
        self._file_bytes_max = file_bytes_max
        self._files = files
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._refused: dict[tuple[object, ...], float] = {}  # until when it is not named again
        self._refused_bytes = 0  # of the lines of this minute
        self._minute_ends = float("-inf")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    @property
    def is_on(self) -> bool:
        return self._path is not None

    def close(self) -> None:
        """Once what is waiting is written."""
        self._thread.shutdown()

    def acted(
        self,
        sender: Sender,
        act: str,
        on: Sequence[str],
        errors: Mapping[str, str] | None,
        *,
        refused: bool = False,
        in_part: bool = False,
    ) -> None:
        """An administrative request, done or not. `errors`: what was not done of it, by name; None: its client
        left before there was an answer. `in_part`: a part of one that was refused was done."""
        result = "unknown" if errors is None else _REFUSED if refused else "failed" if errors else "done"
        errors = errors or {}
        named = dict(zip(_cut(list(errors)), errors.values(), strict=False))
        self._note(sender, act, result, may_be_lost=refused and not in_part, on=_cut(on), errors=named)

    def refused(self, sender: Sender, act: str, why: str) -> None:
        """Any other request, for lack of a right or a login. One that is repeated without end is named once a
        minute."""
        key, now = (sender, act, why), time.monotonic()
        if self._path is None or now < self._refused.get(key, now):
            return
        if len(self._refused) >= AUDIT_REFUSALS_MAX:
            self._refused.clear()
        self._refused[key] = now + _MINUTE_S
        self._note(sender, act, _REFUSED, may_be_lost=True, why=why[:AUDIT_TEXT_CHARS_MAX])

    def _note(self, sender: Sender, act: str, result: str, *, may_be_lost: bool, **fields: Any) -> None:
        if self._path is None:
            return
        if len(self._waiting) >= AUDIT_LINES_WAITING_MAX or (may_be_lost and not self._has_room_for_refusals()):
            self._lost += 1
            return
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "user": sender.user,
            "address": sender.address,
            "port": sender.port,
            "listener": sender.listener,
            "act": act,
            "result": result,
        }
        if self._lost:
            line["lost_before"], self._lost = self._lost, 0
        line |= {name: value for name, value in fields.items() if value}
        if may_be_lost:
            self._refused_bytes += len(json.dumps(line))
        self._waiting.append(line)
        if len(self._waiting) == 1:
            self._thread.submit(self._write, self._path)

    def _has_room_for_refusals(self) -> bool:
        """Refusals cost their senders nothing: without a bound they would push out the lines of what was done."""
        now = time.monotonic()
        if now >= self._minute_ends:
            self._minute_ends, self._refused_bytes = now + _MINUTE_S, 0
        return self._refused_bytes < AUDIT_REFUSED_BYTES_PER_MINUTE_MAX

    # ---------------------------------------------------------------------------------------- in the thread
    def _write(self, path: Path) -> None:
        try:
            while self._waiting:
                line = json.dumps(self._waiting[0]) + "\n"  # in ASCII: names may have what moves a terminal's cursor
                self._rotate(path, len(line))
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE), "a") as file:
                    file.write(line)
                self._waiting.popleft()
        except OSError as e:
            lost = len(self._waiting)
            self._waiting.clear()
            self._lost += lost
            log.error("audit_not_written", path=str(path), reason=str(e), lines=lost)

    def _rotate(self, path: Path, more: int) -> None:
        if not path.exists() or path.stat().st_size + more <= self._file_bytes_max:
            return
        for number in range(self._files - 1, 0, -1):
            older, newer = _numbered(path, number), _numbered(path, number - 1)
            if newer.exists():
                newer.replace(older)
        if self._files == 1:
            path.unlink()


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def setting(name: str, value: object) -> str:
    """A setting that a request changes. Only of those that there are the value is shown: what else a client sends, such
    as Kafka's ssl.keystore.password, may be secret."""
    return f"{name}={value}" if name in TOPIC_CONFIG or name in CLUSTER_CONFIG else name


def _cut(names: Sequence[str]) -> list[str]:
    more = [f"... and {len(names) - AUDIT_NAMES_MAX} more"] if len(names) > AUDIT_NAMES_MAX else []
    return [name[:AUDIT_TEXT_CHARS_MAX] for name in names[:AUDIT_NAMES_MAX]] + more


OFF: Final = Audit()
