"""The offsets that senders get: nonmonotonic-send, repeat-refused, stale-hwm if a mark was known before a record
below it was sent; and offsets assigned without records: offset-reuse, nonmonotonic-assign, offset-gap.

Owns the comparison of the order of offsets with the real-time order of sends and high water marks. (`reads` judges that
marks only grow.) A stored batch is never refused for its age when it comes again. Every range of `assign` goes to one
caller, later callers get later offsets, and there are no more unassigned offsets than the callers with an unknown
outcome requested.
"""

from collections import defaultdict
from itertools import pairwise
from typing import Final

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation
from chaos_tests.history import Op

TOO_OLD: Final = "INVALID_TIMESTAMP"
CLOCKS_APART_NS: Final = 600_000_000  # of a node and of the history, without jumps
EPOCH_NS: Final = 1_700_000_000_000_000_000  # at which a history begins


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        _check_acknowledged(partition, findings)
        if len(partition.acked) < len(partition.sends):
            _check_others(partition, findings)
            _check_repeats(partition, findings)
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


def _check_repeats(partition: PartitionFacts, findings: Findings) -> None:
    """A batch of an idempotent producer that was in the log is not refused for its age."""
    refused = {op.request["v"][0]: op for op in partition.sends if op.reply.get("err") == TOO_OLD}
    if not refused:
        return
    for base, ts_ns, values, *_ in partition.final.values():
        op = refused.get(values[0])
        if op is not None and op.request["idem"] and ts_ns - EPOCH_NS + CLOCKS_APART_NS < op.reply["t"]:
            findings.add("repeat-refused", f"{partition.key}@{base}: it was stored, and refused later", op)


def _add(partition: PartitionFacts, op: Op, offset: int, findings: Findings) -> None:
    mark = partition.mark_before(op.start_ns)
    assert mark.op is not None, "the empty mark is above an offset"
    anomaly = "nonmonotonic-send" if mark.op.function == "send" else "stale-hwm"
    findings.add(anomaly, f"{partition.key}: {offset} after a mark of {mark.end} was known", mark.op, op)


def check_assigned(facts: Facts) -> list[Violation]:
    findings = Findings()
    assigned: dict[str, list[Op]] = defaultdict(list)
    unknown: dict[str, int] = defaultdict(int)
    for op in facts.history.of("assign"):
        if op.is_ok:
            assigned[op.request["k"]].append(op)
        elif op.kind == "info":
            unknown[op.request["k"]] += op.request["c"]
    for key, ops in assigned.items():
        _check_ranges(key, ops, unknown[key], findings)
        _check_assigned_order(key, ops, findings)
    return findings.found


def _check_ranges(key: str, ops: list[Op], unknown: int, findings: Findings) -> None:
    by_base = sorted(ops, key=lambda op: (op.reply["o"], op.reply["o"] + op.request["c"]))
    gaps = 0
    for op, after in pairwise(by_base):
        end = op.reply["o"] + op.request["c"]
        if after.reply["o"] < end:
            findings.add("offset-reuse", f"{key}@{after.reply['o']} was assigned twice", op, after)
        gaps += max(0, after.reply["o"] - end)
    if gaps > unknown:
        detail = f"{key}: {gaps} offsets reached no caller, {unknown} were requested with an unknown outcome"
        findings.add("offset-gap", detail)


def _check_assigned_order(key: str, ops: list[Op], findings: Findings) -> None:
    """A range is above every range that had been assigned before it was requested."""
    ended = sorted(ops, key=lambda op: op.end_ns)
    at, highest = 0, ended[0]
    is_any = False
    for op in sorted(ops, key=lambda op: op.start_ns):
        while at < len(ended) and ended[at].end_ns < op.start_ns:
            if not is_any or ended[at].reply["o"] > highest.reply["o"]:
                highest, is_any = ended[at], True
            at += 1
        if is_any and op.reply["o"] <= highest.reply["o"]:
            detail = f"{key}: {op.reply['o']} although {highest.reply['o']} had been assigned before"
            findings.add("nonmonotonic-assign", detail, highest, op)
