"""The records that Kafka consumers received: poll-skip, nonmonotonic-poll and inconsistent-offsets.

Owns the judgement of `kpoll` operations: one consumer receives the records of each partition in order and without a
gap, and each record is the one that the final read has at its offset. `c` names the consumer; for a member of a group,
`by` names one assignment, which is judged by itself.
"""

from chaos_tests.checkers.base import Facts, Findings, Violation


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    following: dict[tuple[str, str], int] = {}
    for op in facts.history.of("kpoll"):
        if not op.is_ok:
            continue
        consumer: str = op.reply.get("by") or op.request["c"]
        for key, offset, value in op.reply["r"]:
            expected = following.get((consumer, key))
            if expected is not None and offset != expected:
                anomaly = "poll-skip" if offset > expected else "nonmonotonic-poll"
                detail = f"{key}: consumer {consumer} was given {offset}, {expected} was next"
                findings.add(anomaly, detail)
            following[consumer, key] = offset + 1
            partition = facts.partitions.get(key)
            final = partition.final_log().get(offset) if partition is not None else None
            if final is not None and final != value:
                detail = f"{key}@{offset} was given to consumer {consumer} as {value} and is {final}"
                findings.add("inconsistent-offsets", detail, op)
    return findings.found
