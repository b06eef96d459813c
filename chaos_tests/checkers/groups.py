"""A group's committed offset: a linearizable register (stale-commit) whose changes keep their order
(commit-regression).

Owns the zone test of Gibbons and Korach ("Testing shared memories", 1997): if every write has a unique value (the tag
in the metadata), a history is linearizable exactly if no two forward zones overlap and no backward zone is inside a
forward one. A zone spans from the earliest end to the latest start of a write and its reads.

The test takes a commit without an answer as under way for ever, as a register may. But a client that has given up goes
on, and what it does next must count. So a change ends when its client has its answer, or gives up, and what begins
after that is later. Once a later change has been acknowledged, no fetch returns what the earlier one has written; and a
deletion that has ended removes no later commit.

What a transaction stages is such a change, too: it has its place in the order when it is staged, and takes effect when
the transaction is committed, unless a later change has taken effect by then.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    for op in (*facts.history.of("commit"), *_staged(facts)):
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


def _staged(facts: Facts) -> list[Op]:
    """What transactions have staged, as commits that begin and have their place with the staging, and take effect with
    the transaction's end."""
    ends = {op.request["off"]: op for op in facts.history.of("txn")}
    found = []
    for op in facts.history.of("stage"):
        end = ends[op.request["o"]]
        if op.is_ok and end.is_ok and end.reply["out"] == "commit":
            found.append(replace(op, end_ns=end.end_ns))
        else:
            is_open = op.is_ok and end.kind == "info"
            found.append(replace(op, kind="info" if is_open else "fail", end_ns=NEVER_NS))
    return found


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


def ended_ns(op: Op) -> int:
    """When the client had its answer or gave up; NEVER_NS if neither was recorded."""
    return int(op.reply["t"]) if op.reply else NEVER_NS


@dataclass(slots=True)
class _Later:
    """Acknowledged changes by their start, each with the earliest end of it and of all after it."""

    ops: list[Op]
    starts: list[int] = field(default_factory=list)
    first_ended: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops.sort(key=lambda op: op.start_ns)
        self.starts = [op.start_ns for op in self.ops]
        best: Op | None = None
        for op in reversed(self.ops):
            best = op if best is None or op.end_ns < best.end_ns else best
            self.first_ended.append(best)
        self.first_ended.reverse()

    def after(self, time_ns: int) -> Op | None:
        """Of the changes that began after the time, the one that was acknowledged first."""
        at = bisect_right(self.starts, time_ns)
        return self.first_ended[at] if at < len(self.ops) else None


def check_changes(facts: Facts) -> list[Violation]:
    findings = Findings()
    outlives = outliving(facts)
    deletions: dict[str, list[Op]] = {}
    for op in facts.history.of("gdelete"):
        if op.kind != "fail":
            deletions.setdefault(op.request["g"], []).append(op)
    commits: dict[tuple[str, str], list[Op]] = {}
    for op in (*facts.history.of("commit"), *_staged(facts)):
        if op.kind != "fail":
            commits.setdefault((op.request["g"], op.request["k"]), []).append(op)
    reads: dict[tuple[str, str], list[Op]] = {}
    for op in reads_of(facts):
        if outlives(op):
            reads.setdefault((op.request["g"], op.request["k"]), []).append(op)
    for place, found in reads.items():
        name = f"{place[0]} on {place[1]}"
        check_reads(name, commits.get(place, []), deletions.get(place[0], []), found, findings, "commit-regression")
    return findings.found


def check_reads(
    name: str, commits: list[Op], deletions: list[Op], reads: list[Op], findings: Findings, anomaly: str
) -> None:
    """What reads of one place have found is not older than a change that was acknowledged before."""
    by_tag = {op.request["tag"]: op for op in commits}
    later = _Later([op for op in (*commits, *deletions) if op.is_ok])
    kept = _Later([op for op in commits if op.is_ok])
    for read in reads:
        if not read.reply["tag"]:
            _check_absence(name, deletions, kept, read, findings, anomaly)
            continue
        written = by_tag.get(read.reply["tag"])  # `groups` reports a tag that was never written
        overwriting = later.after(ended_ns(written)) if written is not None else None
        if written is not None and overwriting is not None and overwriting.end_ns < read.start_ns:
            detail = f"{name}: {read.reply['tag']!r} was read after a later change had been acknowledged"
            findings.add(anomaly, detail, written, overwriting, read)


def _check_absence(name: str, deletions: list[Op], kept: _Later, read: Op, findings: Findings, anomaly: str) -> None:
    """No commit was found: some deletion must have come after every commit that was acknowledged before."""
    last_ns = max((ended_ns(op) for op in deletions if op.start_ns < read.end_ns), default=-1)
    commit = kept.after(last_ns)
    if commit is not None and commit.end_ns < read.start_ns:
        detail = f"{name}: a commit was gone, and every deletion had ended before it began"
        findings.add(anomaly, detail, commit, read)
