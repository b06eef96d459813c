"""The order of acknowledgements: nonmonotonic-send.

Owns the relation between the real-time order of sends and the order of their offsets.
"""

from bisect import bisect_left

from chaos_tests.checkers.base import Acked, Facts, Findings, Violation


def check(facts: Facts) -> list[Violation]:
    """A send's offset exceeds every offset that was acknowledged before the send was invoked."""
    findings = Findings()
    for partition in facts.partitions.values():
        acked = sorted(partition.acked, key=_end_ns)
        ends = [entry.op.end_ns for entry in acked]
        highest: list[Acked] = []  # of those before, by the order of their ends
        for entry in acked:
            highest.append(entry if not highest or entry.base > highest[-1].base else highest[-1])
        # acks=1 is judged only by what is read: a deposed leader may tell it any offset before it hears of the new.
        for entry in acked:
            at = bisect_left(ends, entry.op.start_ns)
            if at and highest[at - 1].base >= entry.base:
                before = highest[at - 1]
                detail = f"{partition.key}: {entry.base} after {before.base} had been acknowledged"
                findings.add("nonmonotonic-send", detail, before.op, entry.op)
    return findings.found


def _end_ns(entry: Acked) -> int:
    return entry.op.end_ns
