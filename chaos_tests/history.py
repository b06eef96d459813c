"""Histories: the clients' requests, the answers, and the faults, as JSON lines on one clock.

Owns the format, its writer and its reader; simulation and live runs write it, the checkers read it. It must never
judge, and knows neither the simulation nor a cluster.

An event is an object with `t` (monotonic ns), `p` (process, -1 for observations and faults), `ty` (invoke, ok,
fail, info) and `f`. A process has at most one operation open; an `info` (outcome unknown) ends its id.

| f      | invoke                               | ok adds                                                  |
|--------|--------------------------------------|----------------------------------------------------------|
| send   | k, v (values), acks, idem            | o (offset of the first value), ts, dup                   |
| poll   | k, o, n (node), final?               | b ([[base, ts, [values], pid, seq, pe], ...]), lo, hwm, s?  |
| hwm    | k, n                                 | lo, hwm, next, epoch                                     |
| time   | k, ts, n                             | o, ts_found (-1: none)                                   |
| trim   | k, o                                 |                                                          |
| commit | g, k, o, tag, gen?                   |                                                          |
| fetch  | g, k, n                              | o, tag (-1 and "" if there is no commit)                 |
| lag    | g, k, n                              | o, tag, and of a commit: lo, hwm, known, figures, at    |
| gauge  | g, k, n                              | o, lo, hwm, bytes, age, at; nothing if it is not known   |
| gdelete | g                                   |                                                          |
| assign | k, c (count)                         | o (base)                                                 |
| set    | name, v                              |                                                          |
| setting | name, n                             | seen (v)                                                 |
| place  | name, r ([[node, ...], ...])         |                                                          |
| placed | name, n                              | seen (r)                                                 |
| kpoll  | c (consumer), g? (group), k? and o?  | r ([[k, o, v], ...]), by? (one assignment of c), hwm?    |
| gjoin  | g                                    | gen, leader (None: not reported), members                |
| gsync  | g, gen                               | who, parts ([k, ...])                                    |
| txn    | id, v ({k: values}), off (None: none) | out (commit or abort)                                   |
| tpoll  | k, o, n, final                       | r ([[o, v], ...]: what is committed), next, lso          |
| tstable | k                                   | lso                                                      |
| stage  | g, k, o (the `off` of a txn), tag    |                                                          |
| toffset | id, g                               | off (None: none)                                         |
| mirror | k, o, e (end), d (CRC), wrong (must be refused) |                                               |
| own    | k, d (CRC)                           | o                                                        |
| copy   | k, n                                 | b ([[base, end, d], ...]), hwm                           |
| create, drop, alloc | name                    |                                                          |

A poll's `s` has the stored size of its batches: [[base, end, size], ...]. The figures of `lag` are offsets, records,
bytes, age (ms); each may be None. `at` is the wall clock of n (ns) by which it counts the age.
A `kpoll` with `k` and `o` began at that place, where its consumer had just sought; `hwm` is then the highest mark that
the consumer knew at its end.
An invoke with `may_fail` may fail even in a cluster that has settled.
A `fail` carries `err`, and `lo`/`hi` if the error does. Observations (p -1, ty info): `fault` (what, ...),
`lead` (n, term), `digest` (n, i, d), `entry` (n, i, d: CRC of a Raft command), `local` (n, inc, i, k, lo, hwm,
epoch), `died` (n, err), `late-proposal` (n), `heal`, `settled` (ok, why, took_ms), `progress` (ok, why: demanded
while a fault lasts), `topic` (k: known partition), `gdrained` (g, ends: {k: offset}: the group has read everything
below), `found` (why: an anomaly that an observer saw itself), `advertise` (n, address: of its
new process), `told` (n, of, seen: the addresses that n knows of another node, at the end).

What records topics keep is noted before they are written: `retention` (records: this many stay at least, most: and this
many at most, ms, topics?, created_0_ms?: the create time of a record that is sent at t = 0, sampled_ns?: how late a log
start is noted at most) and `compaction` (keys, tombstone_ms, topics?). Without `topics` it holds for all. Then come
`start` (k, lo, hwm, clock: a log start that a client learned), `log-digest` (n, k, d), `compacted` (n, k, twice,
left) and `backlog` (n, k, o, size, stored: bytes from o on, as measured for a group's lag, and as they are).
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

OBSERVER = -1
NEVER_NS = 1 << 62

Event = dict[str, Any]


@contextmanager
def uncollected() -> Iterator[None]:
    """A run makes millions of objects and drops nearly all of them at its end, and judging one makes no cycles: the
    collector's search for cycles would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_NO_REPLY: Event = {}  # of an operation without an outcome


class HistoryError(ValueError):
    """The lines are not a history; the message names the line or the process."""


class Recorder:
    """Appends events; also to a stream, if one is given (a live run may die)."""

    def __init__(self, now_ns: Callable[[], int], sink: TextIO | None = None) -> None:
        self.events: list[Event] = []
        self._now_ns = now_ns
        self._sink = sink
        self._next_process = 0

    def new_process(self) -> int:
        self._next_process += 1
        return self._next_process

    def add(self, process: int, kind: str, function: str, fields: Event) -> Event:
        event: Event = {"t": self._now_ns(), "p": process, "ty": kind, "f": function, **fields}
        self.events.append(event)
        if self._sink is not None:
            self._sink.write(json.dumps(event, separators=(",", ":")) + "\n")
        return event

    def invoke(self, process: int, function: str, **fields: Any) -> Event:
        return self.add(process, "invoke", function, fields)

    def ok(self, process: int, function: str, **fields: Any) -> Event:
        return self.add(process, "ok", function, fields)

    def fail(self, process: int, function: str, **fields: Any) -> Event:
        """Definite: the operation did not and will not take effect."""
        return self.add(process, "fail", function, fields)

    def info(self, process: int, function: str, **fields: Any) -> Event:
        """Unknown: the process id must not be used again."""
        return self.add(process, "info", function, fields)

    def note(self, function: str, **fields: Any) -> Event:
        return self.add(OBSERVER, "info", function, fields)


@dataclass(slots=True)
class Op:
    """One operation. `end_ns` is NEVER_NS and `kind` "info" if its outcome never became known."""

    process: int
    function: str
    start_ns: int
    request: Event
    end_ns: int = NEVER_NS
    kind: str = "info"
    reply: Event = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"

    def brief(self) -> str:
        """One line for a violation's witness."""
        fields = {**self.request, **self.reply}
        shown = {k: v for k, v in fields.items() if k not in ("t", "p", "ty", "f", "b")}
        end = "-" if self.end_ns == NEVER_NS else f"{self.end_ns / 1e6:.3f}"
        return f"[{self.start_ns / 1e6:.3f}..{end} ms] p{self.process} {self.function} {self.kind} {shown}"


@dataclass(slots=True)
class History:
    """Operations by function, in order of invocation, and observations by function, in order of time."""

    ops: dict[str, list[Op]]
    notes: dict[str, list[Event]]
    count: int

    def of(self, function: str) -> list[Op]:
        return self.ops.get(function, [])

    def noted(self, function: str) -> list[Event]:
        return self.notes.get(function, [])

    def noted_of(self, function: str, key: str) -> Event | None:
        """The first observation that holds for the partition's topic: it names that topic, or none."""
        topic = key.rpartition("/")[0]
        return next((e for e in self.noted(function) if topic in e.get("topics", (topic,))), None)


def pair(events: Iterable[Event]) -> History:
    """Matches completions with invocations. HistoryError if a process breaks the rules."""
    ops: dict[str, list[Op]] = {}
    notes: dict[str, list[Event]] = {}
    open_ops: dict[int, Op] = {}
    retired: set[int] = set()
    count = 0
    for event in events:
        process, kind, function = event["p"], event["ty"], event["f"]
        if process == OBSERVER:
            notes.setdefault(function, []).append(event)
        elif kind == "invoke":
            if process in open_ops or process in retired:
                raise HistoryError(f"process {process} invokes {function} at {event['t']} but is busy or retired")
            op = open_ops[process] = Op(process, function, event["t"], event, reply=_NO_REPLY)
            same = ops.get(function)
            if same is None:
                same = ops[function] = []
            same.append(op)
            count += 1
        else:
            done = open_ops.pop(process, None)
            if done is None or done.function != function:
                raise HistoryError(f"process {process} completes a {function} at {event['t']} that it never invoked")
            done.kind, done.reply = kind, event
            if kind == "info":
                retired.add(process)
            else:
                done.end_ns = event["t"]
    return History(ops, notes, count)


def write_jsonl(path: Path, events: Iterable[Event]) -> None:
    with path.open("w", encoding="utf-8") as f:
        for event in events:
            f.write(json.dumps(event, separators=(",", ":")) + "\n")


def read_jsonl(path: Path) -> Iterator[Event]:
    """HistoryError names the line that does not parse. An incomplete last line (the writer was killed) is ignored."""
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith("\n"):
                return
            try:
                event = json.loads(line)
            except ValueError as e:
                raise HistoryError(f"{path}:{number}: {e}") from e
            if not isinstance(event, dict) or not {"t", "p", "ty", "f"} <= event.keys():
                raise HistoryError(f"{path}:{number}: an event needs t, p, ty and f")
            yield event
