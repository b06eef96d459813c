"""Changes of a group's offsets in their order: commit-regression.

Owns this rule. A change ends when its client has its answer, or gives up. What begins after that is later. Once a
later change has been acknowledged, no fetch returns what the earlier one has written; and a deletion that has ended
removes no later commit. (`groups` takes a commit without an answer as under way for ever, as a register may. But a
client that has given up goes on, and what it does next must count.)
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.checkers.groups import outliving, reads_of
from chaos_tests.history import NEVER_NS, Op


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


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    outlives = outliving(facts)
    deletions: dict[str, list[Op]] = {}
    for op in facts.history.of("gdelete"):
        if op.kind != "fail":
            deletions.setdefault(op.request["g"], []).append(op)
    commits: dict[tuple[str, str], list[Op]] = {}
    for op in facts.history.of("commit"):
        if op.kind != "fail":
            commits.setdefault((op.request["g"], op.request["k"]), []).append(op)
    reads: dict[tuple[str, str], list[Op]] = {}
    for op in reads_of(facts):
        if outlives(op):
            reads.setdefault((op.request["g"], op.request["k"]), []).append(op)
    for place, found in reads.items():
        _check(place, commits.get(place, []), deletions.get(place[0], []), found, findings)
    return findings.found


def _check(place: tuple[str, str], commits: list[Op], deletions: list[Op], reads: list[Op], findings: Findings) -> None:
    name = f"{place[0]} on {place[1]}"
    by_tag = {op.request["tag"]: op for op in commits}
    later = _Later([op for op in (*commits, *deletions) if op.is_ok])
    kept = _Later([op for op in commits if op.is_ok])
    for read in reads:
        if not read.reply["tag"]:
            _check_absence(name, deletions, kept, read, findings)
            continue
        written = by_tag.get(read.reply["tag"])  # `groups` reports a tag that was never written
        overwriting = later.after(ended_ns(written)) if written is not None else None
        if written is not None and overwriting is not None and overwriting.end_ns < read.start_ns:
            detail = f"{name}: {read.reply['tag']!r} was read after a later change had been acknowledged"
            findings.add("commit-regression", detail, written, overwriting, read)


def _check_absence(name: str, deletions: list[Op], kept: _Later, read: Op, findings: Findings) -> None:
    """No commit was found: some deletion must have come after every commit that was acknowledged before."""
    last_ns = max((ended_ns(op) for op in deletions if op.start_ns < read.end_ns), default=-1)
    commit = kept.after(last_ns)
    if commit is not None and commit.end_ns < read.start_ns:
        detail = f"{name}: a commit was gone, and every deletion had ended before it began"
        findings.add("commit-regression", detail, commit, read)
