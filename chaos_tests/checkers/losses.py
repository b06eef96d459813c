"""What was acknowledged is there, what failed is not: lost-write, aborted-read, precommitted-read, divergent-replica.

Owns the comparison of everything that clients were told with the final read of every replica.
"""

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation, batches


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        _check_aborted(partition, findings)
        if not partition.was_read_to_the_end:
            continue
        replicas = _final_replicas(partition)
        if not replicas:
            findings.add("lost-write", f"{partition.key}: no replica could be read to its end")
        _check_replicas(partition, replicas, findings)
        for node, (lo, hwm, log) in replicas.items():
            _check_lost(partition, node, lo, hwm, log, findings)
        _check_precommitted(partition, findings)
    return findings.found


Replica = tuple[int, int, dict[int, int]]  # log start, high water mark, offset -> value


def _final_replicas(partition: PartitionFacts) -> dict[int, Replica]:
    """Each replica's last full read, put together from its polls."""
    found: dict[int, Replica] = {}
    for op in partition.finals:
        lo, hwm, log = found.get(op.asked["n"], (0, 0, {}))
        for base, _, values, *_ in batches(op):
            log.update(enumerate(values, base))
        found[op.asked["n"]] = (max(lo, op.told["lo"]), max(hwm, op.told["hwm"]), log)
    return found


def _check_replicas(partition: PartitionFacts, replicas: dict[int, Replica], findings: Findings) -> None:
    """A replica's full read has no hole between its log start and its high water mark."""
    for node, (lo, hwm, log) in replicas.items():
        missing = sorted(set(range(lo, hwm)) - log.keys())
        if missing:
            where = f"{partition.key} on node {node}"
            detail = f"{where}: {len(missing)} offsets of [{lo}, {hwm}) missing, first {missing[0]}"
            findings.add("divergent-replica", detail)
    nodes = list(replicas)
    for node in nodes[1:]:
        first, other = replicas[nodes[0]][2], replicas[node][2]
        if first == other:
            continue
        differing = sorted(offset for offset in first.keys() & other.keys() if first[offset] != other[offset])
        if differing:
            at = differing[0]
            detail = f"{partition.key}@{at} is {first[at]} on node {nodes[0]} and {other[at]} on node {node}"
            findings.add("divergent-replica", detail)


def _check_lost(
    partition: PartitionFacts, node: int, lo: int, hwm: int, log: dict[int, int], findings: Findings
) -> None:
    for base, end, values, op in partition.acked:
        if end > hwm:
            detail = f"{partition.key}@{base} was acknowledged, node {node} ends at {hwm}"
            findings.add("lost-write", detail, op)
        elif base >= lo and log.get(base) != values[0]:
            detail = f"{partition.key}@{base}: {values[0]} was acknowledged, node {node} has {log.get(base)}"
            findings.add("lost-write", detail, op)


def _check_aborted(partition: PartitionFacts, findings: Findings) -> None:
    """A send that definitely failed is never read."""
    failed = {op.asked["v"][0]: op for op in partition.sends if op.kind == "fail"}
    if not failed:
        return
    for (base, _, values, *_), poll in partition.observed:
        for value in values:
            op = failed.get(value)
            if op is not None:
                findings.add("aborted-read", f"{partition.key}@{base}: {value} had failed", op, poll)


def _check_precommitted(partition: PartitionFacts, findings: Findings) -> None:
    """Whatever anybody read is in the final log (unless it has been deleted since)."""
    log = partition.final_log
    lo = max(op.told["lo"] for op in partition.finals)
    for (base, _, values, *_), poll in partition.observed:
        last = base + len(values) - 1
        final = log.get(last)
        if last >= lo and (final is None or final[0] != values[-1]):
            there = "nothing" if final is None else final[0]
            findings.add("precommitted-read", f"{partition.key}@{last}: {values[-1]} was read, finally {there}", poll)
