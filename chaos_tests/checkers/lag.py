"""How far groups are behind, as nodes answer it: wrong-lag, and stale-hwm for an end that was known to be too low.

Owns the judgement of every figure. Offsets, records, bytes and age must follow from what the group had committed, and
from some log between the moments of asking and of answering. Positions are judged by `groups`, as those of fetches. A
figure that is not known is no violation here, unless compaction explains it. Compaction changes the size of batches at
any time: there only what a node measures in the end is compared, with the log that it then has.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op

NS_PER_MS: Final = 1_000_000
_NOTHING: Final[dict[tuple[int, int], int]] = {}


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for event in facts.history.noted("backlog"):
        if event["size"] != event["stored"]:
            detail = f"{event['k']}: node {event['n']} measures {event['size']} bytes from {event['o']} on"
            findings.add("wrong-lag", f"{detail}, and its log has {event['stored']}", event)
    for partition in facts.partitions.values():
        if partition.lags:
            judge = _Judge(facts, partition, findings)
            for op in partition.lags:
                judge.look_at(op)
    return findings.found


@dataclass(slots=True)
class _Sizes:
    """The stored size of each batch that was read, in order. A run of batches that touch has one number."""

    bases: list[int]
    ends: list[int]
    totals: list[int]  # of all before it
    runs: list[int]

    def between(self, start: int, end: int) -> int | None:
        """From the batch that contains `start` to the one that ends at `end`; None if not all of them were read."""
        first, last = bisect_right(self.bases, start) - 1, bisect_left(self.ends, end)
        if first < 0 or last >= len(self.ends) or self.ends[last] != end or self.runs[first] != self.runs[last]:
            return None
        return self.totals[last + 1] - self.totals[first]


def _sizes(partition: PartitionFacts) -> _Sizes:
    found = {base: (end, size) for op in partition.polls for base, end, size in op.reply.get("s", ())}
    sizes, run, before = _Sizes([], [], [0], []), 0, -1
    for base in sorted(found):
        end, size = found[base]
        run += base != before
        before = end
        sizes.bases.append(base)
        sizes.ends.append(end)
        sizes.totals.append(sizes.totals[-1] + size)
        sizes.runs.append(run)
    return sizes


class _Judge:
    """Of one partition."""

    def __init__(self, facts: Facts, partition: PartitionFacts, findings: Findings) -> None:
        self._partition = partition
        self._findings = findings
        self._sizes = _sizes(partition)
        self._is_compacted = facts.history.noted_of("compaction", partition.key) is not None
        self._removed = facts.uncovered.removed.get(partition.key, set())
        self._superseded = facts.uncovered.superseded.get(partition.key, set())
        self._gone_ns = facts.uncovered.gone_ns.get(partition.key, _NOTHING)
        self._stamps = {
            base + place: ts_ns + place
            for base, ts_ns, values, *_ in partition.observed
            for place in range(len(values))
        }
        trims = ((op.request["o"], op.start_ns) for op in partition.trims if op.kind != "fail")
        # Log starts, and when each may have been one first: a node notes it before it cuts its log.
        self._starts = [*trims, *partition.retention_starts.items()]

    def look_at(self, op: Op) -> None:
        end, start = op.reply["hwm"], self._check_range(op)
        if op.function == "lag" and not op.reply["known"]:
            if any(op.reply[figure] is not None for figure in ("offsets", "records", "bytes", "age")):
                self._wrong(op, "a figure although the end is not known")
            return
        if op.function == "lag":
            self._check_counts(op, start, end)
        firsts = [start, *(later for later, ns in self._starts if start < later and ns <= op.end_ns)]
        size, age = op.reply["bytes"], op.reply["age"]
        if (size is None) != (age is None):
            self._wrong(op, f"{size} bytes, and an age of {age} ms: one of them is not known")
        if size is not None and not any(self._may_be_size(size, first, end) for first in firsts):
            self._wrong(op, f"{size} bytes, expected {self._sizes.between(start, end)}")
        if age is not None and not any(self._may_be_age(op, first, end) for first in firsts):
            self._wrong(op, f"an age of {age} ms: no record that may be the next was that old")

    def _wrong(self, op: Op, what: str) -> None:
        self._findings.add("wrong-lag", f"{op.request['g']} on {self._partition.key}: {what}", op)

    def _check_range(self, op: Op) -> int:
        """Returns the first offset that there is to read."""
        lo: int = op.reply["lo"]
        end: int = op.reply["hwm"]
        if op.function == "lag" and op.reply["known"]:
            known = self._partition.mark_before(op.start_ns)
            if end < known.end and known.op is not None:
                detail = f"{self._partition.key}: the lag is counted to {end} although {known.end} was known before"
                self._findings.add("stale-hwm", detail, known.op, op)
            trimmed = (t.request["o"] for t in self._partition.trims if t.is_ok and t.end_ns < op.start_ns)
            if lo < max(trimmed, default=0):
                self._wrong(op, f"it counts from {lo}, where records had been deleted before")
        if not lo <= end:
            self._wrong(op, f"the log start {lo} is above the end {end}")
        position: int = op.reply["o"]
        return max(lo, position)

    def _check_counts(self, op: Op, start: int, end: int) -> None:
        offsets, records = op.reply["offsets"], op.reply["records"]
        if offsets != max(0, end - op.reply["o"]):
            self._wrong(op, f"{offsets} offsets")
        if records is None:
            if not self._is_compacted:
                self._wrong(op, "the records are not known, and nothing was compacted")
            return
        gone = sum(1 for (_, offset), ns in self._gone_ns.items() if start <= offset < end and ns < op.start_ns)
        if records != max(0, end - start) or gone:
            self._wrong(op, f"{records} records from {start} to {end}, of which {gone} had gone")

    def _may_be_size(self, size: int, first: int, end: int) -> bool:
        if first >= end:
            return size == 0
        expected = None if self._is_compacted else self._sizes.between(first, end)
        return size > 0 if expected is None else size == expected

    def _may_be_age(self, op: Op, first: int, end: int) -> bool:
        """Some record that was the next at that node, as far as anyone knows, has this age."""
        for offset in self._may_be_next(op, first, end):
            stamp = None if offset in self._removed else self._stamps.get(offset)
            if offset < end and stamp is None:
                return True  # no client has read it
            expected = 0 if stamp is None or offset >= end else max(0, op.reply["at"] - stamp) // NS_PER_MS
            if op.reply["age"] == expected:
                return True
        return False

    def _may_be_next(self, op: Op, first: int, end: int) -> Iterator[int]:
        """Offsets from `first` on, without those that the node had shown to be gone; the first that compaction cannot
        have removed is the last. `end` if there is no such."""
        offset = first
        while offset < end:
            if self._gone_ns.get((op.request["n"], offset), op.start_ns) >= op.start_ns:
                yield offset
            if offset not in self._superseded and offset not in self._removed:
                return
            offset += 1
        yield end
