"""Answers to readers: single polls and chains of them (poll-skip, nonmonotonic-poll, read-above-hwm, nonmonotonic-ts,
false-out-of-range, false-damage); HWM and log start as linearizable registers that only grow, and look-ups by time
(stale-hwm, wrong-time-offset).

Owns the judgement of single answers to readers, and of answers to GetPartitionRange and OffsetForTime.
"""

from bisect import bisect_left

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation, batches
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        for poll in partition.uneven:
            _check_poll(partition.key, poll, findings)
        _check_timestamps(partition, findings)
        limits = facts.history.noted_of("retention", partition.key) or {}
        _check_refusals(partition, limits.get("sampled_ns", 0), findings)
    return findings.found


def _check_poll(key: str, poll: Op, findings: Findings) -> None:
    """The first batch holds the requested offset, the others follow without a gap, and all end at or below the HWM."""
    requested, expected = poll.request["o"], -1
    for batch in batches(poll):
        base = batch[0]
        end = base + len(batch[2])
        if expected < 0:
            if base > requested:
                findings.add("poll-skip", f"{key}: asked for {requested}, got {base} first", poll)
            elif end <= requested:
                findings.add("nonmonotonic-poll", f"{key}: asked for {requested}, got [{base}, {end})", poll)
        elif base != expected:
            anomaly = "poll-skip" if base > expected else "nonmonotonic-poll"
            findings.add(anomaly, f"{key}: {expected} was next, got {base}", poll)
        expected = end
    if expected > poll.reply["hwm"]:
        findings.add("read-above-hwm", f"{key}: read up to {expected}, the HWM is {poll.reply['hwm']}", poll)


def _check_timestamps(partition: PartitionFacts, findings: Findings) -> None:
    """ts_ns grows from record to record: a record's is its batch's plus its place there."""
    last_ts, last_base = -1, -1
    stamps = {batch[0]: (batch[1], len(batch[2])) for batch in partition.observed}
    for base, (ts_ns, count) in stamps.items():
        if ts_ns <= last_ts:
            detail = f"{partition.key}: ts_ns {ts_ns} at {base}, {last_ts} at {last_base} before it"
            findings.add("nonmonotonic-ts", detail)
        last_ts, last_base = ts_ns + max(count, 1) - 1, base


def _check_refusals(partition: PartitionFacts, sampled_ns: int, findings: Findings) -> None:
    """OFFSET_OUT_OF_RANGE is only answered for offsets out of range (rule 13). DATA_DAMAGED means that every other
    replica's copy is damaged, too, or that no repair has an effect: no fault does that to a committed record."""
    for op in partition.refused_polls:
        if op.reply.get("err") == "DATA_DAMAGED":
            findings.add("false-damage", f"{partition.key}@{op.request['o']} was refused as damaged everywhere", op)
    refused = [op for op in partition.refused_polls if op.reply.get("err") == "OFFSET_OUT_OF_RANGE"]
    if not refused:
        return
    first_lo = min((op.reply["lo"] for op in (*partition.polls, *partition.ranges) if op.is_ok), default=0)
    for op in refused:
        hwm = partition.mark_before(op.start_ns).end
        trims = [t.request["o"] for t in partition.trims if t.kind != "fail" and t.start_ns <= op.end_ns]
        seen_by_ns = op.end_ns + sampled_ns
        if any(start >= op.reply["lo"] and t <= seen_by_ns for start, t in partition.retention_starts.items()):
            trims.append(op.reply["lo"])
        lo = max(trims, default=first_lo)
        if lo <= op.request["o"] <= hwm:
            detail = f"{partition.key}@{op.request['o']} was refused, the valid range was [{lo}, {hwm}]"
            findings.add("false-out-of-range", detail, op)


def check_marks(facts: Facts) -> list[Violation]:
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
