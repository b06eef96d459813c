"""The order of acknowledgements: nonmonotonic-send.

Owns the relation between the real-time order of sends and the order of their offsets.
"""

from operator import attrgetter

from chaos_tests.checkers.base import Facts, Findings, Violation


def check(facts: Facts) -> list[Violation]:
    """A send's offset exceeds every offset that was acknowledged before the send was invoked."""
    findings = Findings()
    for partition in facts.partitions.values():
        ended = sorted(partition.acked, key=attrgetter("op.end_ns"))
        at, before = 0, None  # the highest of those that had ended by then
        # acks=1 is judged only by what is read: a deposed leader may tell it any offset before it hears of the new.
        for entry in partition.acked:  # by the order of their starts
            start_ns = entry.op.start_ns
            while ended[at].op.end_ns < start_ns:
                if before is None or ended[at].base > before.base:
                    before = ended[at]
                at += 1
            if before is not None and before.base >= entry.base:
                detail = f"{partition.key}: {entry.base} after {before.base} had been acknowledged"
                findings.add("nonmonotonic-send", detail, before.op, entry.op)
    return findings.found
