"""Single polls and chains of them: poll-skip, nonmonotonic-poll, read-above-hwm, nonmonotonic-ts,
false-out-of-range.

Owns what one answer to a reader may look like.
"""

from bisect import bisect_right

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        for poll in partition.polls:
            if not _is_plain(poll):
                _check_poll(partition.key, poll, findings)
        _check_timestamps(partition, findings)
        _check_refusals(partition, findings)
    return findings.found


def _is_plain(poll: Op) -> bool:
    """Whether there is nothing to find, as nearly always."""
    found = poll.told["b"]
    if not found:
        return True
    end = found[0][0]
    if end > poll.asked["o"] or poll.asked["o"] >= end + len(found[0][2]):
        return False
    for batch in found:
        if batch[0] != end:
            return False
        end += len(batch[2])
    return bool(end <= poll.told["hwm"])


def _check_poll(key: str, poll: Op, findings: Findings) -> None:
    """The first batch holds the asked offset, each next one follows, and all end at or below the HWM."""
    found = poll.told["b"]
    if not found:
        return
    asked, expected = poll.asked["o"], -1
    for batch in found:
        base = batch[0]
        end = base + len(batch[2])
        if expected < 0:
            if base > asked:
                findings.add("poll-skip", f"{key}: asked for {asked}, got {base} first", poll)
            elif end <= asked:
                findings.add("nonmonotonic-poll", f"{key}: asked for {asked}, got [{base}, {end})", poll)
        elif base != expected:
            anomaly = "poll-skip" if base > expected else "nonmonotonic-poll"
            findings.add(anomaly, f"{key}: {expected} was next, got {base}", poll)
        expected = end
    if expected > poll.told["hwm"]:
        findings.add("read-above-hwm", f"{key}: read up to {expected}, the HWM is {poll.told['hwm']}", poll)


def _check_timestamps(partition: PartitionFacts, findings: Findings) -> None:
    """ts_ns grows from batch to batch."""
    last_ts, last_base = -1, -1
    stamps = {batch[0]: batch[1] for batch, _ in partition.observed}
    for base, ts_ns in stamps.items():
        if ts_ns <= last_ts:
            detail = f"{partition.key}: ts_ns {ts_ns} at {base}, {last_ts} at {last_base} before it"
            findings.add("nonmonotonic-ts", detail)
        last_ts, last_base = ts_ns, base


def _check_refusals(partition: PartitionFacts, findings: Findings) -> None:
    """OFFSET_OUT_OF_RANGE is only said of offsets that are (rule 13)."""
    refused = [op for op in partition.refused_polls if op.told.get("err") == "OFFSET_OUT_OF_RANGE"]
    if not refused:
        return
    told: list[tuple[int, int]] = []  # (when somebody was told it, an offset below or at the HWM)
    told.extend((op.end_ns, op.told["hwm"]) for op in partition.polls)
    told.extend((op.end_ns, op.told["hwm"]) for op in partition.ranges if op.is_ok)
    told.extend((acked.op.end_ns, acked.end) for acked in partition.acked)
    told.sort()
    first_lo = min((op.told["lo"] for op in (*partition.polls, *partition.ranges) if op.is_ok), default=0)
    times, highest = [when for when, _ in told], []
    best = 0
    for _, end in told:
        best = max(best, end)
        highest.append(best)
    for op in refused:
        at = bisect_right(times, op.start_ns)
        hwm = highest[at - 1] if at else 0
        trims = [t.asked["o"] for t in partition.trims if t.kind != "fail" and t.start_ns <= op.end_ns]
        lo = max(trims, default=first_lo)
        if lo <= op.asked["o"] <= hwm:
            detail = f"{partition.key}@{op.asked['o']} was refused, the valid range was [{lo}, {hwm}]"
            findings.add("false-out-of-range", detail, op)
