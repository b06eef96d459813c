"""Single polls and chains of them: poll-skip, nonmonotonic-poll, read-above-hwm, nonmonotonic-ts,
false-out-of-range, false-damage.

Owns the judgement of single answers to readers.
"""

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
