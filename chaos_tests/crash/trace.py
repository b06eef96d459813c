"""A recorded trace: the writes to a node's files, their syncs and the acknowledgements between them, as text.

Owns the format, one event per line, and the images that a power loss at any event may leave. An unsynced write may be
on the disk completely, in part (some sectors) or not at all, in any order; of the changes of names since a directory
was synced, the first few are. It must never look into the files' contents. A stored trace is compressed by xz and
encoded in base64, so that it stays text. A file has a label for ever, whatever its name is.

    d ID BASE64      bytes that writes name (each once)
    w FILE OFFSET ID a write; durable after the next sync of that file
    W FILE OFFSET ID a write through O_DSYNC; durable when the next event begins
    t FILE SIZE      ftruncate; durable as a write is
    s FILE           fdatasync has returned
    n NAME FILE OLD  the file has this name now, and no longer the old one; `-` for no file: the name is gone
    N                the names are durable
    a START END INDEX   acknowledged: log start, log end, last index of the journal
"""

import base64
import lzma
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

SECTORS: Final = (512, 4096)


@dataclass(frozen=True, slots=True)
class Write:
    file: str
    offset: int
    data: bytes
    is_synced: bool


@dataclass(frozen=True, slots=True)
class Truncate:
    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    file: str


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    file: str | None  # None: the name is gone
    old: str = ""  # the name that it had until now


@dataclass(frozen=True, slots=True)
class NamesSynced: ...


@dataclass(frozen=True, slots=True)
class Acked:
    log_start: int
    log_end: int
    journal_index: int


Event = Write | Truncate | Sync | Named | NamesSynced | Acked


@dataclass(slots=True)
class Trace:
    events: list[Event] = field(default_factory=list)

    def without_syncs(self, file: str) -> "Trace":
        """The trace of a store that never waits for its disk when it writes that file."""
        spoilt: list[Event] = []
        for event in self.events:
            if isinstance(event, Write) and _is_of(event.file, file):
                spoilt.append(replace(event, is_synced=False))
            elif not (isinstance(event, Sync) and _is_of(event.file, file)):
                spoilt.append(event)
        return Trace(spoilt)

    def with_late_syncs(self, file: str) -> "Trace":
        """The trace of a store that goes on to its other file before what it wrote to this one is durable."""
        spoilt: list[Event] = []
        is_late, late = False, ""
        for event in self.events:
            if isinstance(event, Acked | Named | NamesSynced) or not _is_of(event.file, file):
                spoilt.append(event)
                if is_late and isinstance(event, Write):
                    spoilt.append(Sync(late))
                    is_late = False
            elif isinstance(event, Write):
                spoilt.append(replace(event, is_synced=False))
                is_late, late = True, event.file
        return Trace(spoilt)


def _is_of(label: str, kind: str) -> bool:
    """Whether a file is of that kind: the suffix of its first name."""
    return label.partition("#")[0].endswith(kind)


def dump(trace: Trace) -> bytes:
    ids: dict[bytes, int] = {}
    lines: list[str] = []
    for event in trace.events:
        match event:
            case Write(file, offset, data, is_synced):
                if data not in ids:
                    ids[data] = len(ids)
                    lines.append(f"d {ids[data]} {base64.b64encode(data).decode()}")
                lines.append(f"{'W' if is_synced else 'w'} {file} {offset} {ids[data]}")
            case Truncate(file, size):
                lines.append(f"t {file} {size}")
            case Sync(file):
                lines.append(f"s {file}")
            case Named(name, named, old):
                lines.append(f"n {name} {named or '-'} {old}")
            case NamesSynced():
                lines.append("N")
            case Acked(start, end, index):
                lines.append(f"a {start} {end} {index}")
    return base64.encodebytes(lzma.compress("\n".join(lines).encode(), preset=9))


def load(path: Path) -> Trace:
    return parse(lzma.decompress(base64.b64decode(path.read_bytes())).decode().splitlines())


def parse(lines: Iterable[str]) -> Trace:
    blobs: dict[str, bytes] = {}
    trace = Trace()
    for line in lines:
        kind, *rest = line.split(" ")
        if kind == "d":
            blobs[rest[0]] = base64.b64decode(rest[1])
        elif kind in "wW":
            trace.events.append(Write(rest[0], int(rest[1]), blobs[rest[2]], kind == "W"))
        elif kind == "t":
            trace.events.append(Truncate(rest[0], int(rest[1])))
        elif kind == "n":
            trace.events.append(Named(rest[0], rest[1] if rest[1] != "-" else None, rest[2]))
        elif kind == "N":
            trace.events.append(NamesSynced())
        elif kind == "s":
            trace.events.append(Sync(rest[0]))
        else:
            trace.events.append(Acked(*(int(number) for number in rest)))
    return trace


@dataclass(frozen=True, slots=True)
class Image:
    """The contents of the files after the power loss, and the last acknowledgement before it."""

    files: dict[str, bytes]
    acked: Acked


def images(trace: Trace, seed: int, count: int) -> Iterable[Image]:
    """`count` images at random moments of the trace, from the first acknowledgement on."""
    rng = Random(seed)
    first = next(i for i, event in enumerate(trace.events) if isinstance(event, Acked))
    moments = sorted(rng.randrange(first + 1, len(trace.events)) for _ in range(count))
    durable, acked, at = _Files(), Acked(0, 0, 0), 0
    pending: list[Write | Truncate] = []
    names: dict[str, str] = {}
    renamed: list[Named] = []  # and not durable
    for moment in moments:
        while at < moment:
            event = trace.events[at]
            at += 1
            match event:
                case Acked():
                    acked = event
                case Sync(file):
                    for write in pending:
                        if write.file == file:
                            durable.change(write)
                    pending = [write for write in pending if write.file != file]
                case Write():
                    if event.is_synced:
                        durable.change(event)
                    else:
                        pending = [*pending, event]
                case Truncate():
                    pending = [*pending, event]
                case Named():
                    renamed.append(event)
                case NamesSynced():
                    names, renamed = _named(names, renamed), []
        under_way = trace.events[at]
        torn = [*pending, under_way] if isinstance(under_way, Write | Truncate) else pending
        contents = _torn(durable, torn, rng).contents()
        found = _named(names, renamed[: rng.randint(0, len(renamed))])
        yield Image({name: contents.get(file, b"") for name, file in found.items()}, acked)


def _named(names: dict[str, str], changes: list[Named]) -> dict[str, str]:
    names = names.copy()
    for change in changes:
        names.pop(change.old, None)
        if change.file is not None:
            names[change.name] = change.file
        else:
            names.pop(change.name, None)
    return names


class _Files:
    def __init__(self, contents: dict[str, bytes] | None = None) -> None:
        self._files = {name: bytearray(data) for name, data in (contents or {}).items()}

    def contents(self) -> dict[str, bytes]:
        return {name: bytes(data) for name, data in self._files.items()}

    def change(self, event: Write | Truncate) -> None:
        if isinstance(event, Write):
            self.apply(event.file, event.offset, event.data)
            return
        file = self._files.setdefault(event.file, bytearray())
        file[event.size :] = bytes(max(event.size - len(file), 0))

    def apply(self, name: str, offset: int, data: bytes) -> None:
        file = self._files.setdefault(name, bytearray())
        if len(file) < offset:
            file.extend(bytes(offset - len(file)))
        file[offset : offset + len(data)] = data


def _torn(durable: _Files, pending: list[Write | Truncate], rng: Random) -> _Files:
    """Applies some of the unsynced writes, or some of their sectors."""
    image = _Files(durable.contents())
    sector, kept = rng.choice(SECTORS), rng.choice((0.05, 0.3, 0.5, 0.7, 0.95))
    is_complete = rng.random() < 0.4
    for write in rng.sample(pending, len(pending)):
        if is_complete or isinstance(write, Truncate):
            if rng.random() < kept:
                image.change(write)
            continue
        for start in range(0, len(write.data), sector):
            if rng.random() < kept:
                image.apply(write.file, write.offset + start, write.data[start : start + sector])
    return image
