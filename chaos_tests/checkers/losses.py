"""Acknowledged records are there, failed ones are not: lost-write, aborted-read, precommitted-read, divergent-replica.

Owns the comparison of all answers to clients with the final read of every replica.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from chaos_tests.checkers.base import Facts, Findings, PartitionFacts, Violation, batches

_BASE_AND_VALUES: Final = itemgetter(0, 2)  # of a batch


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for partition in facts.partitions.values():
        _check_aborted(partition, findings)
        replicas = _final_replicas(partition)
        unread = partition.final_nodes - replicas.keys()
        trims = (op.request["o"] for op in partition.trims if op.kind != "fail")
        trimmed = max((*trims, *partition.retention_starts), default=0)
        if unread and any(acked.end > trimmed for acked in partition.acked):
            findings.add("lost-write", f"{partition.key}: nothing could be read from nodes {sorted(unread)} in the end")
        if not replicas:
            continue
        _check_agreement(partition, replicas, findings)
        for node, replica in {id(replica): (node, replica) for node, replica in replicas.items()}.values():
            _check_complete(partition, node, replica, findings)
            _check_lost(partition, node, replica, findings)
            if facts.history.noted_of("retention", partition.key) is None:
                _check_start(partition, node, replica.lo, trimmed, findings)
        _check_precommitted(partition, findings)
    return findings.found


@dataclass(slots=True)
class _Replica:
    """One replica's whole log, as the final read shows it."""

    lo: int = 0
    hwm: int = 0
    batches: dict[int, list[int]] = field(default_factory=dict)  # base -> values
    _log: dict[int, int] | None = field(default=None, compare=False)

    def log(self) -> dict[int, int]:
        """offset -> value. Built only if the batches alone do not decide: it costs more than everything else here."""
        if self._log is None:
            self._log = {}
            for base, values in self.batches.items():
                self._log.update(enumerate(values, base))
        return self._log


def _final_replicas(partition: PartitionFacts) -> dict[int, _Replica]:
    """Each replica's last full read, joined from its polls. Equal ones (nearly always all) are one object."""
    read: dict[int, _Replica] = defaultdict(_Replica)
    for op in partition.finals:
        replica, reply = read[op.request["n"]], op.reply
        replica.lo, replica.hwm = max(replica.lo, reply["lo"]), max(replica.hwm, reply["hwm"])
        replica.batches.update(map(_BASE_AND_VALUES, batches(op)))
    found: dict[int, _Replica] = {}
    for node, replica in read.items():
        replica.lo = max(replica.lo, partition.final_starts.get(node, 0))
        found[node] = next((twin for twin in found.values() if twin == replica), replica)
    return found


def _check_complete(partition: PartitionFacts, node: int, replica: _Replica, findings: Findings) -> None:
    """The full read of a replica has no hole between its log start and its high water mark."""
    lo, hwm = replica.lo, replica.hwm
    end, is_complete = lo, True
    for base in sorted(replica.batches):
        is_complete = is_complete and base <= end
        end = max(end, base + len(replica.batches[base]))
    if is_complete and end >= hwm:
        return
    missing = sorted(set(range(lo, hwm)) - replica.log().keys())
    if missing:
        where = f"{partition.key} on node {node}"
        detail = f"{where}: {len(missing)} offsets of [{lo}, {hwm}) missing, first {missing[0]}"
        findings.add("divergent-replica", detail)


def _check_agreement(partition: PartitionFacts, replicas: dict[int, _Replica], findings: Findings) -> None:
    """Two replicas that both have an offset have the same value there."""
    nodes = list(replicas)
    for node in nodes[1:]:
        if replicas[node] is replicas[nodes[0]]:
            continue
        first, other = replicas[nodes[0]].log(), replicas[node].log()
        differing = sorted(offset for offset in first.keys() & other.keys() if first[offset] != other[offset])
        if differing:
            at = differing[0]
            detail = f"{partition.key}@{at} is {first[at]} on node {nodes[0]} and {other[at]} on node {node}"
            findings.add("divergent-replica", detail)


def _check_lost(partition: PartitionFacts, node: int, replica: _Replica, findings: Findings) -> None:
    lo, hwm, stored = replica.lo, replica.hwm, replica.batches
    for _, end, op, base, values in partition.acked:
        if end > hwm:
            detail = f"{partition.key}@{base} was acknowledged, node {node} ends at {hwm}"
            findings.add("lost-write", detail, op)
        elif base >= lo and stored.get(base) != values and replica.log().get(base) != values[0]:
            detail = f"{partition.key}@{base}: {values[0]} was acknowledged, node {node} has {replica.log().get(base)}"
            findings.add("lost-write", detail, op)


def _check_start(partition: PartitionFacts, node: int, lo: int, trimmed: int, findings: Findings) -> None:
    """Without retention, only what a client has deleted is gone. (`retention` judges the log starts of the others.)"""
    for _, end, op, base, _ in partition.acked:
        if max(base, trimmed) < min(end, lo):
            detail = f"{partition.key}@{base} was acknowledged, and node {node} begins at {lo}; {trimmed} was asked for"
            findings.add("lost-write", detail, op)


def _check_aborted(partition: PartitionFacts, findings: Findings) -> None:
    """A send that definitely failed is never read."""
    failed = {op.request["v"][0]: op for op in partition.sends if op.kind == "fail"}
    if not failed:
        return
    for batch in partition.observed:
        for value in batch[2]:
            op = failed.get(value)
            if op is not None:
                detail = f"{partition.key}@{batch[0]}: {value} had failed"
                findings.add("aborted-read", detail, op, partition.shown_by(batch))


def _check_precommitted(partition: PartitionFacts, findings: Findings) -> None:
    """Every record that was ever read is in the final log, unless it has been deleted since."""
    final = partition.final
    lo = max(op.reply["lo"] for op in partition.finals)
    for batch in partition.observed:
        base, values = batch[0], batch[2]
        last = base + len(values) - 1
        there = final.get(base)
        if last < lo or (there is not None and there[2] == values):
            continue
        value = partition.final_log().get(last)
        if value != values[-1]:
            shown = "nothing" if value is None else value
            detail = f"{partition.key}@{last}: {values[-1]} was read, in the end {shown}"
            findings.add("precommitted-read", detail, partition.shown_by(batch))
