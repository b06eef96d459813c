"""HWM and log start as linearizable registers that only grow, and look-ups by time: stale-hwm, wrong-time-offset.

Owns the judgement of answers to GetPartitionRange and OffsetForTime.
"""

from bisect import bisect_left

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        for op in partition.ranges:
            if op.is_ok:
                _check_range(partition, op, findings)
        _check_times(partition, facts.uncovered.removed.get(partition.key, set()), findings)
    return findings.found


def _check_range(partition: PartitionFacts, op: Op, findings: Findings) -> None:
    known = partition.mark_before(op.start_ns)
    if op.reply["hwm"] < known.end and known.op is not None:
        detail = f"{partition.key}: HWM {op.reply['hwm']} although {known.end} was known before"
        findings.add("stale-hwm", detail, known.op, op)
    trimmed = max((t.request["o"] for t in partition.trims if t.is_ok and t.end_ns < op.start_ns), default=0)
    if op.reply["lo"] < trimmed:
        detail = f"{partition.key}: the log starts at {op.reply['lo']}, and a client had deleted up to {trimmed}"
        findings.add("stale-hwm", detail, op)
    if not op.reply["lo"] <= op.reply["hwm"] <= op.reply["next"]:
        findings.add("stale-hwm", f"{partition.key}: log start, HWM and next offset are out of order", op)


def _check_times(partition: PartitionFacts, removed: set[int], findings: Findings) -> None:
    """Against the final log: the first record at or after the time, or none if it was written after the request.
    Records that compaction removed some time may be passed over, and their times are not always known."""
    if not partition.times or not partition.final:
        return
    lo = max(op.reply["lo"] for op in partition.finals)
    bases = sorted(partition.final)
    stamps = [partition.final[base][1] + max(len(partition.final[base][2]), 1) - 1 for base in bases]  # last records
    for op in partition.times:
        if not op.is_ok:
            continue
        at = bisect_left(stamps, op.request["ts"])
        right: int | None = None
        if at < len(bases):
            right = max(bases[at] + max(op.request["ts"] - partition.final[bases[at]][1], 0), lo)
        found, known = op.reply["o"], partition.mark_before(op.start_ns).end
        if op.reply["ts_found"] < 0:
            wrong = right is not None and right < known and not removed.issuperset(range(right, known))
        else:
            # Records trimmed since are not in the final log: then only the answer's own timestamp can be judged.
            wrong = found != right and found >= lo
            if wrong and removed:
                wrong = found not in removed and (right is None or not removed.issuperset(range(right, found)))
            wrong = wrong or op.reply["ts_found"] < op.request["ts"]
        if wrong:
            detail = (
                f"{partition.key}: first record at or after {op.request['ts']} is at {right}, the answer was {found}"
            )
            findings.add("wrong-time-offset", detail, op)
