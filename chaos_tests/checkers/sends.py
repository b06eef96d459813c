"""The order of acknowledgements: nonmonotonic-send.

Owns the relation between the real-time order of sends and the order of their offsets.
"""

from bisect import bisect_left
from itertools import accumulate

from chaos_tests.checkers.base import Facts, Findings, Violation, is_acked_by_all
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    """A send's offset exceeds every offset that was acknowledged before the send was invoked."""
    findings = Findings()
    for partition in facts.partitions.values():
        acked = sorted((op for op in partition.sends if is_acked_by_all(op)), key=lambda op: op.end_ns)
        ends = [op.end_ns for op in acked]
        highest = list(accumulate(acked, _higher))
        # acks=1 is judged only by what is read: a deposed leader may tell it any offset before it hears of the new.
        for op in acked:
            at = bisect_left(ends, op.start_ns)
            if at and highest[at - 1].told["o"] >= op.told["o"]:
                before = highest[at - 1]
                detail = f"{partition.key}: {op.told['o']} after {before.told['o']} had been acknowledged"
                findings.add("nonmonotonic-send", detail, before, op)
    return findings.found


def _higher(a: Op, b: Op) -> Op:
    return a if a.told["o"] >= b.told["o"] else b
