"""Violations, and the facts about each partition that several judges share.

Owns Violation and the index of a history by partition. One pass over the history builds the index; each judge then
works in O(n) or O(n log n). It must never depend on the simulation.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from chaos_tests.history import NEVER_NS, Event, History, Op

DETAILS_MAX = 20  # violations reported per anomaly: the first few are enough to find the cause


@dataclass(frozen=True, slots=True)
class Violation:
    """One anomaly, by its name in docs/rules.md, with its smallest witness."""

    anomaly: str
    detail: str
    witness: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((f"{self.anomaly}: {self.detail}", *self.witness))


class Findings:
    """Collects the violations of one judge, up to a bound."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._counts: dict[str, int] = {}

    def add(self, anomaly: str, detail: str, *witness: Op | Event | str) -> None:
        count = self._counts[anomaly] = self._counts.get(anomaly, 0) + 1
        if count <= DETAILS_MAX:
            lines = tuple(w.brief() if isinstance(w, Op) else str(w) for w in witness)
            self.found.append(Violation(anomaly, detail, lines))


# base offset, ts_ns, values, producer id (-1: none), first sequence, producer epoch
Batch: TypeAlias = tuple[int, int, list[int], int, int, int]
_first = itemgetter(0)


class Mark(NamedTuple):
    """A high water mark that a client learned: when, which, and from which operation (None: no client yet)."""

    told_ns: int
    end: int
    op: Op | None


class Acked(NamedTuple):
    """A send that was acknowledged with offsets that may never be used again. Its first fields are those of a Mark."""

    told_ns: int
    end: int
    op: Op
    base: int
    values: list[int]


@dataclass(slots=True)
class PartitionFacts:
    """Everything that a history says about one partition."""

    key: str
    sends: list[Op] = field(default_factory=list)
    acked: list[Acked] = field(default_factory=list)  # the sends with acks=all that succeeded
    polls: list[Op] = field(default_factory=list)  # the successful ones
    refused_polls: list[Op] = field(default_factory=list)
    finals: list[Op] = field(default_factory=list)  # polls of the last full read, also among `polls`
    ranges: list[Op] = field(default_factory=list)
    final_starts: dict[int, int] = field(default_factory=dict)  # by node: the log start that refused polls of it told
    final_nodes: set[int] = field(default_factory=set)  # nodes for which that read was begun, whatever its outcome
    times: list[Op] = field(default_factory=list)
    lags: list[Op] = field(default_factory=list)  # of groups that have committed there: answers of both kinds
    trims: list[Op] = field(default_factory=list)
    retention_starts: dict[int, int] = field(default_factory=dict)  # log starts of nodes, and when they were seen first
    # Polls whose batches are not contiguous from the requested offset, or go past the high water mark.
    uneven: list[Op] = field(default_factory=list)
    # Every distinct batch that was ever read, by base offset and then by time of the first read. Batches are read many
    # times and never cut differently, so their content is judged once per batch, not once per read.
    observed: list[Batch] = field(default_factory=list)
    # base -> batch in the final read of the replicas (of the first replica that has it)
    final: dict[int, Batch] = field(default_factory=dict)
    _final_log: dict[int, int] | None = None
    _marks: list[Mark | Acked] | None = None
    _shown: dict[int, Op] | None = None

    def final_log(self) -> dict[int, int]:
        """offset -> value, from `final`. Built on first use: there are many records, and whole batches nearly always
        suffice."""
        if self._final_log is None:
            self._final_log = {}
            for base, _, values, *_ in reversed(self.final.values()):  # the first replica wins
                self._final_log.update(enumerate(values, base))
        return self._final_log

    def shown_by(self, batch: Batch) -> Op:
        """The poll that first showed this batch of `observed`."""
        if self._shown is None:
            self._shown = {id(shown): op for op in reversed(self.polls) for shown in batches(op)}
        return self._shown[id(batch)]

    def marks(self) -> list[Mark | Acked]:
        """The marks of polls, ranges, lags and acknowledgements that exceeded all earlier ones, by time.

        The first entry is an empty mark, the last one never happened.
        """
        if self._marks is None:
            known: list[Mark | Acked] = [*self.acked]
            top, top_ns = 0, 0
            for op in chain(self.polls, (op for op in self.ranges if op.is_ok), self.lags):
                mark, end_ns = op.reply["hwm"], op.end_ns
                if mark > top or end_ns < top_ns:  # otherwise an equal mark was known by then
                    known.append(Mark(end_ns, mark, op))
                    if mark > top:
                        top, top_ns = mark, end_ns
            known.sort(key=_first)
            self._marks = [Mark(-1, 0, None)]
            top = 0
            for entry in known:
                if entry[1] > top:
                    top = entry[1]
                    self._marks.append(entry)
            self._marks.append(Mark(NEVER_NS, top, None))
        return self._marks

    def mark_before(self, when_ns: int) -> Mark | Acked:
        """The highest mark that any client knew by then."""
        marks = self.marks()
        return marks[max(bisect_left(marks, when_ns, key=_first), 1) - 1]


def batches(op: Op) -> list[Batch]:
    found: list[Batch] = op.reply["b"]
    return found


class Uncovered(NamedTuple):
    """What a first look at compacted partitions found, the offsets of the records that it missed in some read, and
    those of records that compaction may remove."""

    violations: list[Violation]
    removed: dict[str, set[int]]
    superseded: dict[str, set[int]]
    gone_ns: dict[str, dict[tuple[int, int], int]]  # by node and offset: when a read of that node had first missed it


@dataclass(slots=True)
class Facts:
    """A history by partition."""

    history: History
    uncovered: Uncovered = field(default_factory=lambda: Uncovered([], {}, {}, {}))
    partitions: dict[str, PartitionFacts] = field(default_factory=dict)


class _Partitions(dict[str, PartitionFacts]):
    """By key. A missing partition is created on access."""

    def __missing__(self, key: str) -> PartitionFacts:
        found = self[key] = PartitionFacts(key)
        return found


def index(history: History) -> Facts:
    """Sorts the operations of a history by partition."""
    partitions = _Partitions()
    for op in history.of("send"):
        request = op.request
        of = partitions[request["k"]]
        of.sends.append(op)
        if op.kind == "ok" and request["acks"] == -1:
            base, values = op.reply["o"], request["v"]
            of.acked.append(Acked(op.end_ns, base + len(values), op, base, values))
    for op in history.of("hwm"):
        partitions[op.request["k"]].ranges.append(op)
    for op in history.of("time"):
        partitions[op.request["k"]].times.append(op)
    for op in (*history.of("lag"), *history.of("gauge")):
        if op.is_ok and "hwm" in op.reply:
            partitions[op.request["k"]].lags.append(op)
    for op in history.of("trim"):
        partitions[op.request["k"]].trims.append(op)
    if history.noted("retention"):
        for event in (*history.noted("local"), *history.noted("start")):
            partitions[event["k"]].retention_starts.setdefault(event["lo"], event["t"])
    _index_polls(history.of("poll"), partitions)
    for op in history.of("kpoll"):
        if op.kind == "fail":
            partitions[op.request["k"]].refused_polls.append(op)
    return Facts(history=history, partitions=dict(partitions))


def _index_polls(polls: list[Op], partitions: _Partitions) -> None:
    for op in polls:
        request = op.request
        of = partitions[request["k"]]
        is_final = request.get("final")
        if is_final:
            of.final_nodes.add(request["n"])
        if op.kind == "ok":
            of.polls.append(op)
            if is_final:
                of.finals.append(op)
        elif op.kind == "fail":
            of.refused_polls.append(op)
            if is_final and op.reply.get("lo") is not None:
                of.final_starts[request["n"]] = max(of.final_starts.get(request["n"], 0), op.reply["lo"])
    for of in partitions.values():
        of.observed = _observe(of)
        for op in of.finals:
            for batch in batches(op):
                of.final.setdefault(batch[0], batch)


def _observe(of: PartitionFacts) -> list[Batch]:
    """All distinct batches that were read; notes uneven polls on the way.

    Judging spends most of its time here: one pass over all batches of all polls, without a call.
    """
    first: dict[int, Batch] = {}
    others: dict[int, list[Batch]] = {}  # different batches at the base of a first one
    for op in of.polls:
        found = op.reply["b"]
        if not found:
            continue
        offset, end = op.request["o"], found[0][0]
        is_even = end <= offset < end + len(found[0][2])
        for batch in found:
            base = batch[0]
            if base != end:
                is_even = False
            end = base + len(batch[2])
            known = first.setdefault(base, batch)
            if known is not batch and known != batch:
                differing = others.setdefault(base, [])
                if batch not in differing:
                    differing.append(batch)
        if not is_even or end > op.reply["hwm"]:
            of.uneven.append(op)
    return sorted(chain(first.values(), *others.values()), key=_first)
