"""What compaction removed: lost-key, early-tombstone, resurrected, late-compaction, divergent-bytes.

Owns what a read of a compacted partition means. A missing record is no hole if the log still has, below the high water
mark, a later record of its key. `uncover` puts the values of such records back before the other judges look, so that
they judge compacted logs as any others.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from chaos_tests.checkers.base import Batch, Facts, Findings, Uncovered, Violation
from chaos_tests.history import Event, History, Op
from chaos_tests.keyed import GONE, is_tombstone, key_of

NS_PER_MS: Final = 1_000_000
LATE_RECORDS_MAX: Final = 120  # above what is compacted in the end: the probes, and what was sent just before
_NOBODY: Final = -1


@dataclass(slots=True)
class _Partition:
    values: dict[int, int] = field(default_factory=dict)  # offset -> value, as acknowledged or read
    stamps: dict[int, int] = field(default_factory=dict)  # offset -> ts_ns, of a batch of which a record was read
    sent_ns: dict[int, int] = field(default_factory=dict)  # value -> when its send began
    doubtful: list[list[int]] = field(default_factory=list)  # sends that may or may not have been stored, by values
    reads: list[tuple[Op, list[int], list[int]]] = field(default_factory=list)  # offsets there, offsets gone
    end: int = 0  # of what was committed, as far as a client or a node said

    def by_key(self, keys: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for offset in sorted(self.values):
            found[key_of(self.values[offset], keys)].append(offset)
        return found

    def runs(self) -> list[tuple[int, int]]:
        """The offsets of known values as [start, end), ascending."""
        found: list[tuple[int, int]] = []
        for offset in sorted(self.values):
            start = found.pop()[0] if found and found[-1][1] == offset else offset
            found.append((start, offset + 1))
        return found


class _Doubts:
    """Where records in doubt may lie: a batch lies in one piece, at offsets of which nothing says what was there."""

    def __init__(self, partition: _Partition, keys: int) -> None:
        self._sends = partition.doubtful
        self._keys = keys
        self._runs = partition.runs()
        self._found: dict[int, dict[int, int]] = {}

    def last_of_keys(self, below: int) -> dict[int, int]:
        """key -> the last offset below that where a record of it may lie."""
        if below not in self._found:
            self._found[below] = self._look(below)
        return self._found[below]

    def _look(self, below: int) -> dict[int, int]:
        ends: dict[int, int | None] = {}  # number of records -> end of the last gap for as many
        found: dict[int, int] = {}
        for values in self._sends:
            size = len(values)
            if size not in ends:
                ends[size] = self._gap_end(size, below)
            end = ends[size]
            for offset, value in enumerate(values, end - size) if end is not None else ():
                key = key_of(value, self._keys)
                found[key] = max(offset, found.get(key, -1))
        return found

    def _gap_end(self, size: int, below: int) -> int | None:
        number, end = bisect_left(self._runs, (below, 0)) - 1, below
        while number >= 0:
            start, stop = self._runs[number]
            if end - stop >= size:
                return end
            number, end = number - 1, min(end, start)
        return end if end >= size else None


class _Served:
    """The last read that began before a time and returned a record. Times are asked for in ascending order."""

    def __init__(self, partition: _Partition) -> None:
        self._reads = sorted(partition.reads, key=lambda read: read[0].start_ns)
        self._number = 0
        self._last: dict[int, Op] = {}  # by offset

    def lately(self, offsets: Iterable[int], since_ns: int, until_ns: int) -> Op | None:
        """A read that began after `since_ns`, and not after `until_ns`, and returned a record of one of these."""
        while self._number < len(self._reads) and self._reads[self._number][0].start_ns <= until_ns:
            op, there, _ = self._reads[self._number]
            self._last.update(dict.fromkeys(there, op))
            self._number += 1
        found = (self._last[offset] for offset in offsets if offset in self._last)
        return next((op for op in found if op.start_ns > since_ns), None)


def uncover(history: History) -> Uncovered:
    """Judges what is missing in every poll, and fills it in. Nothing happens in a history without compaction."""
    if not history.noted("compaction"):
        return Uncovered([], {}, {}, {})
    findings = Findings()
    removed: dict[str, set[int]] = {}
    superseded: dict[str, set[int]] = {}
    gone_ns: dict[str, dict[tuple[int, int], int]] = {}
    partitions = _index(history)
    for key, partition in partitions.items():
        noted = history.noted_of("compaction", key)
        if noted is None:
            continue
        _judge(key, partition, noted, findings)
        removed[key] = _guess_stamps(partition)
        superseded[key] = _superseded(partition, noted["keys"])
        gone_ns[key] = _gone_ns(partition)
        for op, _, _ in partition.reads:
            if op.function == "poll":
                _fill(op, partition)
    return Uncovered(findings.found, removed, superseded, gone_ns)


def _index(history: History) -> dict[str, _Partition]:
    found: dict[str, _Partition] = defaultdict(_Partition)
    for op in history.of("send"):
        if op.kind == "ok" and op.request["acks"] == -1:
            partition = found[op.request["k"]]
            for offset, value in enumerate(op.request["v"], op.reply["o"]):
                partition.values.setdefault(offset, value)
    for op in history.of("poll"):
        if op.kind != "ok":
            continue
        partition = found[op.request["k"]]
        there: list[int] = []
        gone: list[int] = []
        for base, ts_ns, values, *_ in op.reply["b"]:
            for offset, value in enumerate(values, base):
                if value == GONE:
                    gone.append(offset)
                else:
                    there.append(offset)
                    partition.stamps.setdefault(offset, ts_ns + offset - base)
                    partition.values.setdefault(offset, value)
        partition.reads.append((op, there, gone))
    for op in history.of("kpoll"):
        if op.kind == "ok" and "k" in op.request:
            _add_consumed(found[op.request["k"]], op)
    for op in history.of("send"):
        found[op.request["k"]].sent_ns.update(dict.fromkeys(op.request["v"], op.start_ns))
    sends = [op for op in history.of("send") if op.kind != "fail"]
    for key, partition in found.items():
        _settle_doubts(partition, [op.request["v"] for op in sends if op.request["k"] == key])
        partition.end = max((op.reply["hwm"] for op, _, _ in partition.reads), default=0)
    for event in (*history.noted("local"), *history.noted("start")):
        if event["k"] in found:
            found[event["k"]].end = max(found[event["k"]].end, event["hwm"])
    return dict(found)


def _settle_doubts(partition: _Partition, sends: list[list[int]]) -> None:
    """A batch of which any record has been seen is all there, or was: its others have their places and times, too."""
    places = {value: offset for offset, value in partition.values.items()}
    for values in sends:
        base = next((places[value] - number for number, value in enumerate(values) if value in places), None)
        if base is None:
            partition.doubtful.append(values)
            continue
        stamped = next((offset for offset in range(base, base + len(values)) if offset in partition.stamps), None)
        for offset, value in enumerate(values, base):
            partition.values.setdefault(offset, value)
            if stamped is not None:
                partition.stamps.setdefault(offset, partition.stamps[stamped] + offset - stamped)


def _add_consumed(partition: _Partition, op: Op) -> None:
    """What a Kafka consumer was given from a place on. It passed over the others up to the last one: they were gone."""
    given: dict[int, int] = {offset: value for _, offset, value in op.reply["r"]}
    for offset, value in given.items():
        partition.values.setdefault(offset, value)
    passed = range(op.request["o"], max(given, default=-1) + 1)
    partition.reads.append((op, list(given), [offset for offset in passed if offset not in given]))


def _judge(key: str, partition: _Partition, noted: Event, findings: Findings) -> None:
    by_key = partition.by_key(noted["keys"])
    values, doubts, served = partition.values, _Doubts(partition, noted["keys"]), _Served(partition)
    kept_ns = noted["tombstone_ms"] * NS_PER_MS * 9 // 10
    deleted: dict[int, tuple[int, int, Op]] = {}  # key -> the first time that a tombstone was gone, where it was
    for op, _, gone in sorted(partition.reads, key=lambda read: read[0].end_ns):
        hwm = op.reply["hwm"]
        last_in_doubt = doubts.last_of_keys(hwm)
        for offset in gone:
            value = values.get(offset)
            if value is None:
                continue  # never acknowledged, never read: no source says what it was
            record_key = key_of(value, noted["keys"])
            offsets = by_key[record_key]
            after = bisect_right(offsets, offset)
            has_later = after < len(offsets) and offsets[after] < hwm
            if has_later or offset < last_in_doubt.get(record_key, -1):
                continue
            if not is_tombstone(value):
                findings.add("lost-key", f"{key}@{offset}: {value}, the last of key {record_key}, is gone", op)
            elif op.end_ns - partition.sent_ns.get(value, op.end_ns) < kept_ns:
                findings.add("early-tombstone", f"{key}@{offset}: the tombstone of key {record_key} is gone", op)
            elif shown := served.lately(offsets[: after - 1], op.end_ns - kept_ns, op.end_ns):
                detail = f"{key}@{offset}: the tombstone of key {record_key} is gone, and an older record was served"
                findings.add("early-tombstone", detail, shown, op)
            elif record_key not in deleted or deleted[record_key][1] < offset:
                deleted[record_key] = op.end_ns, offset, op
    for op, there, _ in partition.reads:
        for offset in there:
            ns, tombstone, shown = deleted.get(key_of(values[offset], noted["keys"]), (0, _NOBODY, op))
            if offset < tombstone and op.start_ns > ns:
                detail = f"{key}@{offset} was read, and its tombstone at {tombstone} was gone before"
                findings.add("resurrected", detail, shown, op)


def _superseded(partition: _Partition, keys: int) -> set[int]:
    """Records with a later one of their key, or perhaps with one: nothing says what was at a later offset, and a record
    of their key may have been stored there. And tombstones."""
    values = partition.values
    found = {offset for offset, value in values.items() if is_tombstone(value)}
    last_in_doubt = _Doubts(partition, keys).last_of_keys(partition.end)
    for record_key, offsets in partition.by_key(keys).items():
        found.update(offsets[:-1])
        if offsets[-1] < last_in_doubt.get(record_key, -1):
            found.add(offsets[-1])
    return found


def _guess_stamps(partition: _Partition) -> set[int]:
    """A record that was never read before it went was appended after the one before it. Returns what went."""
    gone = {offset for _, _, offsets in partition.reads for offset in offsets}
    before, stamp = -1, 0
    for offset in sorted(gone | partition.stamps.keys()):
        stamp = partition.stamps.setdefault(offset, stamp + offset - before)
        before = offset
    return gone


def _gone_ns(partition: _Partition) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for op, _, gone in partition.reads:
        for offset in gone if op.function == "poll" else ():
            at = op.request["n"], offset
            found[at] = min(op.end_ns, found.get(at, op.end_ns))
    return found


def _fill(op: Op, partition: _Partition) -> None:
    """One batch per record: the cuts between batches change when a log is compacted. A record that was never seen
    gets a number that no producer sends."""
    filled: list[Batch] = []
    requested = op.request["o"]
    for base, ts_ns, found, *_ in op.reply["b"]:
        contains = not filled and base <= requested < base + len(found)
        for offset, value in enumerate(found, base):
            if contains and offset < requested:
                continue
            if value == GONE:
                shown = partition.values.get(offset, -10 - offset)
                filled.append((offset, partition.stamps[offset], [shown], -1, -1, -1))
            else:
                filled.append((offset, ts_ns + offset - base, [value], -1, -1, -1))
    op.reply = {**op.reply, "b": filled}  # the recorded event stays as it is: a kept history is judged again


def check(facts: Facts) -> list[Violation]:
    """What `uncover` found, and the state in the end."""
    findings = Findings()
    findings.found += facts.uncovered.violations
    if facts.history.noted("compaction"):
        _check_bytes(facts.history.noted("log-digest"), findings)
        _check_end(facts.history.noted("compacted"), findings)
    return findings.found


def _check_bytes(noted: Iterable[Event], findings: Findings) -> None:
    """All replicas end with the same bytes (P3)."""
    first: dict[str, Event] = {}
    for event in noted:
        other = first.setdefault(event["k"], event)
        if other["d"] != event["d"]:
            detail = f"{event['k']}: nodes {other['n']} and {event['n']} hold different bytes"
            findings.add("divergent-bytes", detail)


def _check_end(noted: Iterable[Event], findings: Findings) -> None:
    """Once everything has healed, what is compacted holds no key twice, and little is not compacted."""
    for event in noted:
        if event["twice"]:
            findings.add("late-compaction", f"{event['k']}: {event['twice']} records have a later one of their key")
        if event["left"] > LATE_RECORDS_MAX:
            findings.add("late-compaction", f"{event['k']}: {event['left']} records have not been looked at")
