"""The high water mark as a linearizable register that only grows, and look-ups by time: stale-hwm, wrong-time-offset.

Owns what GetPartitionRange and OffsetForTime may answer.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        asked = [op for op in partition.ranges if op.is_ok]
        if asked or partition.times:
            floor = _Floor(partition, asked)
            for op in asked:
                _check_range(partition, op, floor, findings)
            _check_invented(partition, asked, findings)
            _check_times(partition, floor, findings)
    return findings.found


class _Floor:
    """The highest mark that somebody had been told before a question began."""

    def __init__(self, partition: PartitionFacts, asked: list[Op]) -> None:
        self._starts = sorted({op.start_ns for op in (*asked, *partition.times)})
        # By question: the highest of what was told since the question before it, then of all that was told by then.
        self._best: list[tuple[int, Op | None]] = [(0, None)] * (len(self._starts) + 1)
        self._told(partition)
        for at in range(1, len(self._best)):
            self._best[at] = max(self._best[at - 1], self._best[at], key=itemgetter(0))

    def _told(self, partition: PartitionFacts) -> None:
        best = self._best
        ranges = [op for op in partition.ranges if op.is_ok]
        for op, at in chain(self._questions_after(partition.polls), self._questions_after(ranges)):
            hwm = op.told["hwm"]
            if hwm > best[at][0]:
                best[at] = (hwm, op)
        acked = [entry.op for entry in partition.acked]
        for entry, (op, at) in zip(partition.acked, self._questions_after(acked), strict=True):
            if entry.end > best[at][0]:
                best[at] = (entry.end, op)

    def _questions_after(self, ops: list[Op]) -> Iterator[tuple[Op, int]]:
        """Each with the first question that began after its end. They end nearly in order: the place moves little."""
        starts, at, count = self._starts, 0, len(self._starts)
        for op in ops:
            end_ns = op.end_ns
            while at < count and starts[at] <= end_ns:
                at += 1
            while at and starts[at - 1] > end_ns:
                at -= 1
            yield op, at

    def before(self, question: Op) -> tuple[int, Op | None]:
        return self._best[bisect_left(self._starts, question.start_ns)]


def _check_range(partition: PartitionFacts, op: Op, floor: _Floor, findings: Findings) -> None:
    known, witness = floor.before(op)
    if op.told["hwm"] < known and witness is not None:
        detail = f"{partition.key}: HWM {op.told['hwm']} although {known} had been told before"
        findings.add("stale-hwm", detail, witness, op)
    if not op.told["lo"] <= op.told["hwm"] <= op.told["next"]:
        findings.add("stale-hwm", f"{partition.key}: log start, HWM and next offset are out of order", op)


def _check_invented(partition: PartitionFacts, asked: list[Op], findings: Findings) -> None:
    """The HWM never passes a record whose send begins only later: it would have been told before it existed."""
    if not partition.final_log:
        return
    told = [(op, partition.final_log.get(op.told["hwm"] - 1)) for op in asked]
    wanted = {last[0] for _, last in told if last is not None}
    start_of: dict[int, int] = {}
    for op in partition.sends:
        values = op.asked["v"]
        if not wanted.isdisjoint(values):
            start_of.update((value, op.start_ns) for value in values)
    for op, last in told:
        if last is not None and start_of.get(last[0], 0) > op.end_ns:
            findings.add("stale-hwm", f"{partition.key}: HWM {op.told['hwm']} before {last[0]} was sent", op)


def _check_times(partition: PartitionFacts, floor: _Floor, findings: Findings) -> None:
    """By the final log: the first record at or after the time, or none if it came later than the question."""
    if not partition.times or not partition.final_log:
        return
    log = sorted((offset, ts_ns) for offset, (_, ts_ns, _) in partition.final_log.items())
    lo = max(op.told["lo"] for op in partition.finals)
    offsets, stamps = [offset for offset, _ in log], [ts_ns for _, ts_ns in log]
    for op in partition.times:
        if not op.is_ok:
            continue
        at = bisect_left(stamps, op.asked["ts"])
        right = max(offsets[at], lo) if at < len(offsets) else None
        found, known = op.told["o"], floor.before(op)[0]
        if op.told["ts_found"] < 0:
            wrong = right is not None and right < known
        else:
            # What was trimmed since is not in the final log: then only the answer's own stamp can be judged.
            wrong = found != right and found >= lo
            wrong = wrong or op.told["ts_found"] < op.asked["ts"]
        if wrong:
            detail = f"{partition.key}: first record at or after {op.asked['ts']} is at {right}, told {found}"
            findings.add("wrong-time-offset", detail, op)
