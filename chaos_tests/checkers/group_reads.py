"""Groups that share a topic's records: unread and commit-regression.

Owns the judgement of a group as a whole. In the end, at least one of its consumers has received every acknowledged
record below the `ends` of its `gdrained` note. No commit of a group that reads is below a commit that was acknowledged
before it began. (`kafka` judges the records of one consumer, `groups` whether fetched offsets are current, and
`membership` that no old generation commits.)
"""

from collections import defaultdict

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    _check_unread(facts, findings)
    # A group that reads begins at its last commit; the simulation's members commit arbitrary offsets.
    readers = {op.request["g"] for op in facts.history.of("kpoll") if "g" in op.request}
    commits: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in facts.history.of("commit"):
        if op.is_ok and "gen" in op.request and op.request["g"] in readers:
            commits[op.request["g"], op.request["k"]].append(op)
    for ops in commits.values():
        _check_order(ops, findings)
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


def _check_order(ops: list[Op], findings: Findings) -> None:
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
