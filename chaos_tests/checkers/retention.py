"""What retention deletes: early-deletion, late-deletion.

Owns the judgement of every log start that a node had, or that a client learned, while topics had limits. Clients' own
deletions explain a log start, too. Age is judged by the replicated clock, as the node knew it with that log start, or
by one that is not behind it; bytes as the leader counts them, without what is not committed. What a client has written
in a transaction stays while that is open.
"""

from typing import Final

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Event

CREATED_0_MS: Final = 1_700_000_000_000  # the create time of a record that is sent when a run begins
LATE_SEND_MS: Final = 1_000  # at most between a record's creation and its first attempt
LATE_RECORDS_MAX: Final = 30  # a batch, and what the last probes have written since the last look
COMPACTED_RECORDS_MAX: Final = 120  # as above: a compacted batch may have taken the place of many
LOOK_NS: Final = 3_000_000_000  # once the oldest batch is too old by the clock: a new leader, its look, and Raft
NS_PER_MS: Final = 1_000_000


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    history = facts.history
    if not history.noted("retention"):
        return []
    by_key: dict[str, list[Event]] = {}
    for event in (*history.noted("local"), *history.noted("start")):
        by_key.setdefault(event["k"], []).append(event)
    for key, events in by_key.items():
        limits = history.noted_of("retention", key)
        if limits is None:
            continue
        removed = facts.uncovered.superseded.get(key, set())
        if limits.get("bytes"):
            continue  # `_check_kept` has the sizes
        events.sort(key=lambda event: (event.get("i", 0), event["t"]))
        for event in events:
            _check_early(facts.partitions[key], event, limits, removed, findings)
        if facts.partitions[key].finals:
            slack = COMPACTED_RECORDS_MAX if history.noted_of("compaction", key) else LATE_RECORDS_MAX
            _check_late(key, events[-1], limits, slack, findings)
            if limits["ms"] and history.noted_of("compaction", key) is None:
                _check_overdue(facts.partitions[key], events, limits, findings)
    _check_kept(facts, findings)
    _check_held(facts, findings)
    return findings.found


def _check_early(partition: PartitionFacts, event: Event, limits: Event, removed: set[int], findings: Findings) -> None:
    """Those after each deleted batch are as many as are to be kept, or it is old enough. Batches that compaction has
    emptied may go with it, or after what a client has deleted, so that fewer offsets are left than records are to be
    kept."""
    lo, hwm = event["lo"], event["hwm"]
    trims = (op.request["o"] for op in partition.trims if op.kind != "fail" and op.start_ns <= event["t"])
    trimmed = max(trims, default=0)
    if lo <= trimmed or (limits["records"] and hwm - lo >= limits["records"]):
        return
    young_ms = event["clock"] - limits["ms"] - limits.get("created_0_ms", CREATED_0_MS) + LATE_SEND_MS
    for acked in partition.acked:
        # What a client has deleted, or compaction has removed, no longer keeps its batch.
        is_deleted = acked.end <= lo and not removed.issuperset(range(max(acked.base, trimmed), acked.end))
        are_enough = limits["records"] and hwm - acked.end >= limits["records"]
        if is_deleted and not are_enough and (not limits["ms"] or acked.op.start_ns > young_ms * NS_PER_MS):
            detail = f"{partition.key}@{acked.base} was deleted, the log is [{lo}, {hwm})"
            findings.add("early-deletion", detail, acked.op)


def _check_kept(facts: Facts, findings: Findings) -> None:
    """Where bytes are limited, nothing else is: so many committed ones are left after each deletion."""
    for event in facts.history.noted("kept"):
        trims = facts.partitions[event["k"]].trims
        trimmed = (op.request["o"] for op in trims if op.kind != "fail" and op.start_ns <= event["t"])
        if event["size"] < event["least"] and event["lo"] > max(trimmed, default=0):
            detail = f"{event['k']}: [{event['lo']}, {event['hwm']}) was left, of {event['size']} bytes"
            findings.add("early-deletion", detail)


def _check_held(facts: Facts, findings: Findings) -> None:
    """While its transaction was open, a producer found what it had written."""
    for op in facts.history.of("hold"):
        if op.is_ok and op.reply["lo"] > op.reply["o"]:
            detail = f"{op.request['k']}@{op.reply['o']} was deleted up to {op.reply['lo']} in an open transaction"
            findings.add("early-deletion", detail, op)


def _check_late(key: str, last: Event, limits: Event, slack: int, findings: Findings) -> None:
    """Once everything has healed, no more records are left than are to be kept, but for the newest few."""
    kept, most = last["hwm"] - last["lo"], limits.get("most", limits["records"])
    if most and kept > most + slack:
        findings.add("late-deletion", f"{key}: {kept} records are left of {most}")


def _check_overdue(partition: PartitionFacts, events: list[Event], limits: Event, findings: Findings) -> None:
    """Nor is the oldest batch much older than it may be, by the replicated clock as a node knew it once the batch was
    committed: where that clock is ahead, a batch may be too old as soon as it is written. Batches sent before its
    answer may lie before it, and keep it. (A compacted batch may be younger than its send: without records it has the
    time of its append.)"""
    last = events[-1]
    before = [event for event in events if "i" in event and event["t"] <= last["t"] - LOOK_NS]
    known = [event["clock"] for event in before if event["hwm"] > last["lo"]]
    kept_since_ms = max(known, default=0) - limits["ms"] - limits.get("created_0_ms", CREATED_0_MS)
    for acked in partition.acked:
        if acked.base <= last["lo"] < acked.end and acked.op.end_ns < kept_since_ms * NS_PER_MS:
            detail = f"{partition.key}@{acked.base} is still there, {limits['ms']} ms and more after its creation"
            findings.add("late-deletion", detail, acked.op)
