"""The offsets of sends: nonmonotonic-send, and stale-hwm if a mark was known before a record below it was sent.

Owns the comparison of the order of offsets with the real-time order of sends and high water marks. `marks` judges that
marks only grow.
"""

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        _check_acknowledged(partition, findings)
        if len(partition.acked) < len(partition.sends):
            _check_others(partition, findings)
    return findings.found


def _check_acknowledged(partition: PartitionFacts, findings: Findings) -> None:
    """A send's offset is no lower than any high water mark that a client knew before the send was invoked."""
    marks, at = partition.marks(), 0
    for _, _, op, base, _ in partition.acked:  # in the order of their starts
        start_ns = op.start_ns
        while marks[at + 1][0] < start_ns:
            at += 1
        if base < marks[at][1]:
            _add(partition, op, base, findings)


def _check_others(partition: PartitionFacts, findings: Findings) -> None:
    """The same for every other record of the final read. The answer to acks=1 does not count: a deposed leader may
    answer with any offset before it hears of the new leader."""
    acknowledged = {id(acked.op) for acked in partition.acked}
    others = {value: op for op in partition.sends if id(op) not in acknowledged for value in op.request["v"]}
    for offset, value in partition.final_log().items():
        op = others.get(value)
        if op is not None and offset < partition.mark_before(op.start_ns)[1]:
            _add(partition, op, offset, findings)


def _add(partition: PartitionFacts, op: Op, offset: int, findings: Findings) -> None:
    mark = partition.mark_before(op.start_ns)
    assert mark.op is not None, "the empty mark is above an offset"
    anomaly = "nonmonotonic-send" if mark.op.function == "send" else "stale-hwm"
    findings.add(anomaly, f"{partition.key}: {offset} after a mark of {mark.end} was known", mark.op, op)
