"""The records that Kafka consumers received: poll-skip, nonmonotonic-poll and inconsistent-offsets.

Owns the judgement of `kpoll` operations: one consumer receives the records of each partition in order and without a
gap, and each record is the one that was acknowledged, or that the final read has, at its offset. `c` names the
consumer; for a member of a group, `by` names one assignment, which is judged by itself. A read that names its place
begins there. What it passes over in a compacted partition is judged by `compaction`, what it is refused by `reads`.
"""

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    following: dict[tuple[str, str], int] = {}
    stored: dict[str, dict[int, int]] = {}
    for op in facts.history.of("kpoll"):
        if not op.is_ok:
            continue
        consumer: str = op.reply.get("by") or op.request["c"]
        if "k" in op.request:
            following[consumer, op.request["k"]] = op.request["o"]
        for key, offset, value in op.reply["r"]:
            if key not in stored:
                stored[key] = _stored(facts.partitions.get(key))
            may_skip = "k" in op.request and facts.history.noted_of("compaction", key) is not None
            _check_order(key, consumer, offset, following.get((consumer, key)), findings, may_skip=may_skip)
            following[consumer, key] = offset + 1
            _check_value(key, consumer, offset, value, stored[key], op, findings)
    return findings.found


def _stored(partition: PartitionFacts | None) -> dict[int, int]:
    """By offset: what was acknowledged there, or is there in the end."""
    if partition is None:
        return {}
    found = partition.final_log().copy()
    for acked in partition.acked:
        for offset, value in enumerate(acked.values, acked.base):
            found.setdefault(offset, value)
    return found


def _check_order(
    key: str, consumer: str, offset: int, expected: int | None, findings: Findings, *, may_skip: bool
) -> None:
    if expected is None or offset == expected or (may_skip and offset > expected):
        return
    anomaly = "poll-skip" if offset > expected else "nonmonotonic-poll"
    findings.add(anomaly, f"{key}: consumer {consumer} was given {offset}, {expected} was next")


def _check_value(
    key: str, consumer: str, offset: int, value: int, stored: dict[int, int], op: Op, findings: Findings
) -> None:
    known = stored.get(offset)
    if known is not None and known != value:
        detail = f"{key}@{offset} was given to consumer {consumer} as {value} and is {known}"
        findings.add("inconsistent-offsets", detail, op)
