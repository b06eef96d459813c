"""What a judge returns, and the facts about each partition that several judges share.

Owns Violation and the index of a history by partition. One pass over the history builds it; every judge then
works in O(n) or O(n log n). It must never depend on the simulation.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from chaos_tests.history import Event, History, Op

DETAILS_MAX = 20  # violations reported an anomaly: the first few tell the story


@dataclass(frozen=True, slots=True)
class Violation:
    """One anomaly, by the name docs/rules.md explains, with its smallest witness."""

    anomaly: str
    detail: str
    witness: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((f"{self.anomaly}: {self.detail}", *self.witness))


class Findings:
    """Collects violations of one judge, bounded."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._counts: dict[str, int] = {}

    def add(self, anomaly: str, detail: str, *witness: Op | Event | str) -> None:
        count = self._counts[anomaly] = self._counts.get(anomaly, 0) + 1
        if count <= DETAILS_MAX:
            lines = tuple(w.brief() if isinstance(w, Op) else str(w) for w in witness)
            self.found.append(Violation(anomaly, detail, lines))


# base offset, ts_ns, values, producer id (-1: none), first sequence, producer epoch
Batch = tuple[int, int, list[int], int, int, int]


class Acked(NamedTuple):
    """A send whose producer was told offsets that may never be used again."""

    base: int
    end: int
    values: list[int]
    op: Op


@dataclass(slots=True)
class PartitionFacts:
    """Everything a history says about one partition."""

    key: str
    sends: list[Op] = field(default_factory=list)
    acked: list[Acked] = field(default_factory=list)  # of the sends: those with acks=all that succeeded
    polls: list[Op] = field(default_factory=list)  # those answered ok
    refused_polls: list[Op] = field(default_factory=list)
    finals: list[Op] = field(default_factory=list)  # polls of the last full read, also among `polls`
    ranges: list[Op] = field(default_factory=list)
    asked_finally: set[int] = field(default_factory=set)  # nodes of which that read was begun, whatever came of it
    times: list[Op] = field(default_factory=list)
    trims: list[Op] = field(default_factory=list)
    # Every different batch that was ever read, with the first poll that showed it, by base and then by time. Batches
    # are read many times and never cut anew, so what concerns their content is judged once a batch, not once a read.
    observed: list[tuple[Batch, Op]] = field(default_factory=list)
    # offset -> (value, ts_ns, witness), as the final read of the replicas shows it (first replica that has it)
    final_log: dict[int, tuple[int, int, Op]] = field(default_factory=dict)


def batches(op: Op) -> list[Batch]:
    found: list[Batch] = op.told["b"]
    return found


@dataclass(slots=True)
class Facts:
    """A history by partition."""

    history: History
    partitions: dict[str, PartitionFacts] = field(default_factory=dict)


def index(history: History) -> Facts:
    """Sorts the operations of a history by partition."""
    facts = Facts(history)

    def partition(op: Op) -> PartitionFacts:
        key: Any = op.asked["k"]
        found = facts.partitions.get(key)
        if found is None:
            found = facts.partitions[key] = PartitionFacts(key)
        return found

    partitions = facts.partitions  # most of a history is sends and polls: these two loops call nobody
    for op in history.of("send"):
        asked = op.asked
        of = partitions.get(asked["k"]) or partition(op)
        of.sends.append(op)
        if op.kind == "ok" and asked["acks"] == -1:
            base, values = op.told["o"], asked["v"]
            of.acked.append(Acked(base, base + len(values), values, op))
    for op in history.of("poll"):
        if op.asked.get("final"):
            partition(op).asked_finally.add(op.asked["n"])
        if op.kind == "ok":
            asked = op.asked
            of = partitions.get(asked["k"]) or partition(op)
            of.polls.append(op)
            if asked.get("final"):
                of.finals.append(op)
        elif op.kind == "fail":
            partition(op).refused_polls.append(op)
    for op in history.of("hwm"):
        partition(op).ranges.append(op)
    for op in history.of("time"):
        partition(op).times.append(op)
    for op in history.of("trim"):
        partition(op).trims.append(op)
    for found in facts.partitions.values():
        found.observed = _observed(found.polls)
        for op in found.finals:
            for base, ts_ns, values, *_ in batches(op):
                if base not in found.final_log:
                    for at, value in enumerate(values, base):
                        if at not in found.final_log:
                            found.final_log[at] = (value, ts_ns, op)
    return facts


def _observed(polls: list[Op]) -> list[tuple[Batch, Op]]:
    first: dict[int, tuple[Batch, Op]] = {}
    others: dict[int, list[tuple[Batch, Op]]] = {}  # that lie at the base of a first one
    for op in polls:
        for batch in op.told["b"]:
            known = first.get(batch[0])
            if known is None:
                first[batch[0]] = (batch, op)
            elif known[0] != batch and all(other != batch for other, _ in others.get(batch[0], ())):
                others.setdefault(batch[0], []).append((batch, op))
    return sorted(chain(first.values(), *others.values()), key=_base)


def _base(entry: tuple[Batch, Op]) -> int:
    return entry[0][0]
