"""CommitBatch: torn-batch, repeated-batch, lost-batch, and aborted-read of a batch that was never committed.

Owns the judgement of `batch` operations. Each is one attempt at a batch of an app; all attempts at a batch stage the
same values. What the final committed reads show of them is each value once, or none of them.
"""

from collections import Counter, defaultdict

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.checkers.ledgers import Ledgers
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    attempts: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in facts.history.of("batch"):
        attempts[op.request["app"], op.request["id"]].append(op)
    shown = _shown(facts)
    for ops in attempts.values():
        _check_answers(ops, findings)
        if shown is not None:
            _check_visible(ops, shown, findings)
    return findings.found


def _shown(facts: Facts) -> Counter[int] | None:
    """How often each value is visible at the end, by one replica of each partition; None without a final read. Of
    compacted logs, what `ledgers` puts back counts as visible."""
    noted, polls = facts.history.noted("compaction"), [op for op in facts.history.of("tpoll") if op.is_ok]
    if noted:
        ledgers = Ledgers(noted[0], facts.history.of("txn"), facts.history.of("batch"), polls, Findings())
        return Counter(value for records in ledgers.shown.values() for value in records.values()) or None
    reads: dict[str, tuple[int, list[int]]] = {}
    for op in polls:
        if op.request["final"]:
            node, values = reads.setdefault(op.request["k"], (op.request["n"], []))
            if node == op.request["n"]:
                values += [value for _, value in op.reply["r"]]
    return Counter(value for _, values in reads.values() for value in values) if reads else None


def _check_answers(ops: list[Op], findings: Findings) -> None:
    first = [op for op in ops if op.is_ok and not op.reply["replay"]]
    if len(first) > 1:
        findings.add("repeated-batch", f"{len(first)} attempts have each committed it first", first[1])


def _check_visible(ops: list[Op], shown: Counter[int], findings: Findings) -> None:
    values = ops[0].request["v"]
    name = f"batch {ops[0].request['id']} of {ops[0].request['app']}"
    counts = {value: shown[value] for value in values}
    if max(counts.values()) > 1:
        findings.add("repeated-batch", f"{name}: its values are visible so often: {counts}", ops[0])
    if min(counts.values()) == 0 < max(counts.values()):
        findings.add("torn-batch", f"{name}: a part of it is visible: {counts}", ops[0])
    if any(op.is_ok for op in ops) and not any(counts.values()):
        findings.add("lost-batch", f"{name} was committed and is not visible", ops[0])
    if all(op.kind == "fail" for op in ops) and any(counts.values()):
        findings.add("aborted-read", f"{name} was never committed and is visible", ops[0])
