"""A group's committed offset as a linearizable register: stale-commit.

Owns the zone test of Gibbons and Korach ("Testing shared memories", 1997): if every write has a unique value (the tag
in the metadata), a history is linearizable exactly if no two forward zones overlap and no backward zone is inside a
forward one. A zone spans from the earliest end to the latest start of a write and its reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import NEVER_NS, Op

BEFORE_ALL_NS = -1


@dataclass(slots=True)
class _Cluster:
    """One write and the reads that returned it."""

    tag: str
    write: Op | None  # None: the register before its first write
    first_end_ns: int
    last_start_ns: int
    reads: list[Op] = field(default_factory=list)

    @property
    def is_forward(self) -> bool:
        return self.first_end_ns < self.last_start_ns

    @property
    def low_ns(self) -> int:
        return min(self.first_end_ns, self.last_start_ns)

    @property
    def high_ns(self) -> int:
        return max(self.first_end_ns, self.last_start_ns)

    def witness(self) -> list[Op | str]:
        ops: list[Op | str] = [self.write or "(never committed)"]
        return ops + list(self.reads[-1:])


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    registers: dict[tuple[str, str], tuple[list[Op], list[Op]]] = {}
    outlives = outliving(facts)
    deleted = {op.request["g"] for op in facts.history.of("gdelete")}  # no register: `group_changes` judges these
    for op in facts.history.of("commit"):
        registers.setdefault((op.request["g"], op.request["k"]), ([], []))[0].append(op)
    for op in reads_of(facts):
        if outlives(op):
            registers.setdefault((op.request["g"], op.request["k"]), ([], []))[1].append(op)
    for (group, key), (writes, reads) in registers.items():
        if group in deleted:
            continue
        clusters = _clusters(f"{group} on {key}", writes, reads, findings)
        _check_zones(f"{group} on {key}", clusters, findings)
    return findings.found


def reads_of(facts: Facts) -> list[Op]:
    """The answers that say what a group has committed: its lag is counted from there."""
    return [op for op in (*facts.history.of("fetch"), *facts.history.of("lag")) if op.is_ok]


def outliving(facts: Facts) -> Callable[[Op], bool]:
    """Whether an operation ended before its topic's deletion began: that deletes the offsets, too."""
    dropped = {op.request["name"]: op.start_ns for op in reversed(facts.history.of("drop"))}
    return lambda op: op.end_ns < dropped.get(op.request["k"].rsplit("/", 1)[0], NEVER_NS)


def _clusters(name: str, writes: list[Op], reads: list[Op], findings: Findings) -> list[_Cluster]:
    clusters = {"": _Cluster("", None, BEFORE_ALL_NS, BEFORE_ALL_NS)}
    failed = {}
    for op in writes:
        tag = op.request["tag"]
        if op.kind == "fail":
            failed[tag] = op
        else:
            clusters[tag] = _Cluster(tag, op, op.end_ns, op.start_ns)
    for op in reads:
        cluster = clusters.get(op.reply["tag"])
        if cluster is None:
            findings.add("stale-commit", f"{name}: a commit was read that failed or was never made", op)
            continue
        write = cluster.write
        if write is not None and (op.end_ns < write.start_ns or op.reply["o"] != write.request["o"]):
            findings.add("stale-commit", f"{name}: read before it was written, or with another offset", write, op)
        cluster.first_end_ns = min(cluster.first_end_ns, op.end_ns)
        cluster.last_start_ns = max(cluster.last_start_ns, op.start_ns)
        cluster.reads.append(op)
    # A commit with an unknown outcome may never have happened if no fetch ever returned it.
    return [c for c in clusters.values() if c.reads or (c.write is not None and c.first_end_ns < NEVER_NS)]


def _check_zones(name: str, clusters: list[_Cluster], findings: Findings) -> None:
    forward = sorted((c for c in clusters if c.is_forward), key=lambda c: c.low_ns)
    for earlier, later in pairwise(forward):
        if later.low_ns < earlier.high_ns:
            detail = f"{name}: {earlier.tag!r} and {later.tag!r} were each current while the other was"
            findings.add("stale-commit", detail, *earlier.witness(), *later.witness())
    if not forward:
        return
    at = 0
    for cluster in sorted((c for c in clusters if not c.is_forward), key=lambda c: c.low_ns):
        while at < len(forward) and forward[at].high_ns <= cluster.high_ns:
            at += 1
        # Forward zones do not overlap (or are already reported): only the first that ends later can hold this one.
        if at < len(forward) and forward[at].low_ns < cluster.low_ns and cluster.high_ns < forward[at].high_ns:
            detail = f"{name}: {forward[at].tag!r} was read before and after {cluster.tag!r} had overwritten it"
            findings.add("stale-commit", detail, *forward[at].witness(), *cluster.witness())
