"""Each offset has one value and each value one offset: inconsistent-offsets, offset-reuse, duplicate,
duplicate-sequence, sequence-gap, inconsistent-ts.

Owns the judgement of the content of every replica's log. `losses` judges reads of uncommitted records, and loss.
"""

from functools import cache, partial
from itertools import chain

from chaos_tests.checkers.base import Batch, Facts, Findings, PartitionFacts, Violation, batches
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        if not _is_plain(partition):
            seen, places = _check_reads(partition, findings)
            _check_acknowledged(partition, seen, places, findings)
        _check_sequences(partition, findings)
    return findings.found


def _is_plain(partition: PartitionFacts) -> bool:
    """Whether the batches that were read do not overlap, hold each value once, and include every acknowledged batch.

    This is nearly always so, and then no record needs a check of its own.
    """
    stored = {batch[0]: batch[2] for batch in partition.observed}
    end, count = 0, 0
    for base, values in stored.items():
        if base < end:
            return False
        end = base + len(values)
        count += len(values)
    if len(stored) < len(partition.observed) or len(set(chain.from_iterable(stored.values()))) < count:
        return False
    return all(stored.get(base) == values for _, _, _, base, values in partition.acked)


Seen = dict[int, tuple[int, int, Batch]]  # offset -> value, ts_ns, the batch that first showed it
Places = dict[int, int]  # value -> the offset where it was first read


def _check_reads(partition: PartitionFacts, findings: Findings) -> tuple[Seen, Places]:
    """All polls of all replicas agree on the value at an offset, and no value is at two offsets."""
    seen: Seen = {}
    places: Places = {}
    idempotent = cache(partial(_idempotent_values, partition))  # seldom needed
    shown_by = partition.shown_by
    for batch in partition.observed:
        ts_ns = batch[1]
        for offset, value in enumerate(batch[2], batch[0]):
            first = seen.get(offset)
            if first is None:
                seen[offset] = (value, ts_ns, batch)
                other = places.setdefault(value, offset)
                if other != offset:
                    anomaly = "duplicate-sequence" if value in idempotent() else "duplicate"
                    detail = f"{partition.key}: value {value} is at {other} and at {offset}"
                    findings.add(anomaly, detail, shown_by(seen[other][2]), shown_by(batch))
            elif first[0] != value:
                detail = f"{partition.key}@{offset} was read as {first[0]} and as {value}"
                findings.add("inconsistent-offsets", detail, shown_by(first[2]), shown_by(batch))
            elif first[1] != ts_ns:
                detail = f"{partition.key}@{offset} has ts_ns {first[1]} and {ts_ns}"
                findings.add("inconsistent-ts", detail, shown_by(first[2]), shown_by(batch))
    return seen, places


def _idempotent_values(partition: PartitionFacts) -> set[int]:
    return {value for op in partition.sends if op.request.get("idem") for value in op.request["v"]}


def _check_acknowledged(partition: PartitionFacts, seen: Seen, places: Places, findings: Findings) -> None:
    """Acknowledged offsets agree with the reads, and no offset was acknowledged for two values."""
    value_at: dict[int, tuple[int, Op]] = {}
    # acks=1 promises nothing: its batch may go with the leader, and a late first attempt may bring it back.
    for _, _, op, base, values in partition.acked:
        for offset, value in enumerate(values, base):
            read_at = places.get(value, offset)
            if read_at != offset:
                detail = f"{partition.key}: {value} was acknowledged at {offset} and read at {read_at}"
                findings.add("inconsistent-offsets", detail, op, partition.shown_by(seen[read_at][2]))
            first = value_at.get(offset)
            if first is None:
                value_at[offset] = (value, op)
            elif first[0] != value:
                detail = f"{partition.key}@{offset} was acknowledged for {first[0]} and for {value}"
                findings.add("offset-reuse", detail, first[1], op)
            read = seen.get(offset)
            if read is not None and read[0] != value:
                detail = f"{partition.key}@{offset} was acknowledged for {value} and read as {read[0]}"
                findings.add("offset-reuse", detail, op, partition.shown_by(read[2]))


def _check_sequences(partition: PartitionFacts, findings: Findings) -> None:
    """In the final log, the sequences of a producer id follow one another without a gap."""
    expected: dict[tuple[int, int], int] = {}
    for op in partition.finals:
        if op.request.get("n") != partition.finals[0].request.get("n"):
            continue
        for base, _, values, producer, sequence, epoch in batches(op):
            if producer < 0:
                continue
            key = (producer, epoch)
            following = expected.get(key)
            if following is not None and sequence != following:
                anomaly = "duplicate-sequence" if sequence < following else "sequence-gap"
                detail = f"{partition.key}@{base}: producer {key} wrote sequence {sequence}, {following} was next"
                findings.add(anomaly, detail, op)
            expected[key] = sequence + len(values)
