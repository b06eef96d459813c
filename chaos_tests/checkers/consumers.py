"""The records that Kafka consumers received, each by itself (poll-skip, nonmonotonic-poll, inconsistent-offsets) and as
groups (unread, commit-regression).

Owns the judgement of `kpoll` operations: one consumer receives the records of each partition in order and without a
gap, and each record is the one that was acknowledged, or that the final read has, at its offset. `c` names the
consumer; for a member of a group, `by` names one assignment, which is judged by itself. A read that names its place
begins there. What it passes over in a compacted partition is judged by `compaction`, what it is refused by `reads`. In
the end, at least one consumer of a group has received every acknowledged record below the `ends` of its `gdrained`
note, and no commit of a group that reads is below a commit that was acknowledged before it began. (`groups` judges
whether fetched offsets are current, `membership` that no old generation commits.)
"""

from collections import defaultdict

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


def check_groups(facts: Facts) -> list[Violation]:
    findings = Findings()
    _check_unread(facts, findings)
    # A group that reads begins at its last commit; the simulation's members commit arbitrary offsets.
    readers = {op.request["g"] for op in facts.history.of("kpoll") if "g" in op.request}
    commits: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in facts.history.of("commit"):
        if op.is_ok and "gen" in op.request and op.request["g"] in readers:
            commits[op.request["g"], op.request["k"]].append(op)
    for ops in commits.values():
        _check_commits(ops, findings)
    return findings.found


def _check_unread(facts: Facts, findings: Findings) -> None:
    read: dict[tuple[str, str], set[int]] = defaultdict(set)
    for op in facts.history.of("kpoll"):
        if op.is_ok and "g" in op.request:
            for key, offset, _ in op.reply["r"]:
                read[op.request["g"], key].add(offset)
    for event in facts.history.noted("gdrained"):
        for key, end in event["ends"].items():
            partition = facts.partitions.get(key)
            if partition is None:
                continue
            known = set(partition.final_log())
            for acked in partition.acked:
                known.update(range(acked.base, acked.end))
            missing = sorted(offset for offset in known - read[event["g"], key] if offset < end)
            if missing:
                detail = f"{key}: {len(missing)} records were never given to group {event['g']}, first {missing[0]}"
                findings.add("unread", detail)


def _check_commits(ops: list[Op], findings: Findings) -> None:
    """Each generation begins at the last commit of the one before it, so commits never go back."""
    ended = sorted(ops, key=lambda op: op.end_ns)
    at = 0
    highest: Op | None = None
    for op in sorted(ops, key=lambda op: op.start_ns):
        while at < len(ended) and ended[at].end_ns < op.start_ns:
            if highest is None or ended[at].request["o"] > highest.request["o"]:
                highest = ended[at]
            at += 1
        if highest is not None and op.request["o"] < highest.request["o"]:
            moved = f"from {highest.request['o']} to {op.request['o']}"
            detail = f"group {op.request['g']} on {op.request['k']} went back {moved}"
            findings.add("commit-regression", detail, highest, op)
