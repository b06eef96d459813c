"""A recorded trace: the writes to one file, its syncs and the acknowledgements between them, as text.

Owns the format, one event per line, and the images that a power loss at any event may leave. An unsynced write may be
on the disk completely, in part (some sectors) or not at all, in any order. It must never look into the file's contents.
A stored trace is compressed by xz and encoded in base64, so that it stays text.

    d ID BASE64      bytes that writes name (each once)
    w OFFSET ID      a write; durable after the next sync
    W OFFSET ID      a write through O_DSYNC; durable when the next event begins
    s                fdatasync has returned
    a START END INDEX   acknowledged: log start, log end, last index of the journal
"""

import base64
import lzma
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

SECTORS: Final = (512, 4096)


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes
    is_synced: bool


@dataclass(frozen=True, slots=True)
class Sync:
    pass


@dataclass(frozen=True, slots=True)
class Acked:
    log_start: int
    log_end: int
    journal_index: int


Event = Write | Sync | Acked


@dataclass(slots=True)
class Trace:
    events: list[Event] = field(default_factory=list)

    def without_syncs(self) -> "Trace":
        """The trace of a store that never waits for its disk."""
        spoilt: list[Event] = []
        for event in self.events:
            if isinstance(event, Write):
                spoilt.append(Write(event.offset, event.data, is_synced=False))
            elif isinstance(event, Acked):
                spoilt.append(event)
        return Trace(spoilt)


def dump(trace: Trace) -> bytes:
    ids: dict[bytes, int] = {}
    lines: list[str] = []
    for event in trace.events:
        match event:
            case Write(offset, data, is_synced):
                if data not in ids:
                    ids[data] = len(ids)
                    lines.append(f"d {ids[data]} {base64.b64encode(data).decode()}")
                lines.append(f"{'W' if is_synced else 'w'} {offset} {ids[data]}")
            case Sync():
                lines.append("s")
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
            trace.events.append(Write(int(rest[0]), blobs[rest[1]], kind == "W"))
        elif kind == "s":
            trace.events.append(Sync())
        else:
            trace.events.append(Acked(*(int(number) for number in rest)))
    return trace


@dataclass(frozen=True, slots=True)
class Image:
    """The contents of the file after the power loss, and the last acknowledgement before it."""

    data: bytes
    acked: Acked


def images(trace: Trace, seed: int, count: int) -> Iterable[Image]:
    """`count` images at random moments of the trace, from the first acknowledgement on."""
    rng = Random(seed)
    first = next(i for i, event in enumerate(trace.events) if isinstance(event, Acked))
    moments = sorted(rng.randrange(first + 1, len(trace.events)) for _ in range(count))
    durable, acked, at = bytearray(), Acked(0, 0, 0), 0
    pending: list[Write] = []
    for moment in moments:
        while at < moment:
            event = trace.events[at]
            at += 1
            match event:
                case Acked():
                    acked = event
                case Sync():
                    for write in pending:
                        _apply(durable, write.offset, write.data)
                    pending = []
                case Write():
                    if event.is_synced:
                        _apply(durable, event.offset, event.data)
                    else:
                        pending = [*pending, event]
        under_way = trace.events[at]
        torn = [*pending, under_way] if isinstance(under_way, Write) else pending
        yield Image(bytes(_torn(durable, torn, rng)), acked)


def _torn(durable: bytearray, pending: list[Write], rng: Random) -> bytearray:
    """Applies some of the unsynced writes, or some of their sectors."""
    image = bytearray(durable)
    sector, kept = rng.choice(SECTORS), rng.choice((0.05, 0.3, 0.5, 0.7, 0.95))
    is_complete = rng.random() < 0.4
    for write in rng.sample(pending, len(pending)):
        if is_complete:
            if rng.random() < kept:
                _apply(image, write.offset, write.data)
            continue
        for start in range(0, len(write.data), sector):
            if rng.random() < kept:
                _apply(image, write.offset + start, write.data[start : start + sector])
    return image


def _apply(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data
