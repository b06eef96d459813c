"""Offsets assigned without records: offset-reuse, nonmonotonic-assign, offset-gap.

Owns the judgement of `assign` operations: every range goes to one caller, later callers get later offsets, and there
are no more unassigned offsets than the callers with an unknown outcome requested.
"""

from collections import defaultdict
from itertools import pairwise

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    assigned: dict[str, list[Op]] = defaultdict(list)
    unknown: dict[str, int] = defaultdict(int)
    for op in facts.history.of("assign"):
        if op.is_ok:
            assigned[op.request["k"]].append(op)
        elif op.kind == "info":
            unknown[op.request["k"]] += op.request["c"]
    for key, ops in assigned.items():
        _check_ranges(key, ops, unknown[key], findings)
        _check_order(key, ops, findings)
    return findings.found


def _check_ranges(key: str, ops: list[Op], unknown: int, findings: Findings) -> None:
    by_base = sorted(ops, key=lambda op: (op.reply["o"], op.reply["o"] + op.request["c"]))
    gaps = 0
    for op, after in pairwise(by_base):
        end = op.reply["o"] + op.request["c"]
        if after.reply["o"] < end:
            findings.add("offset-reuse", f"{key}@{after.reply['o']} was assigned twice", op, after)
        gaps += max(0, after.reply["o"] - end)
    if gaps > unknown:
        detail = f"{key}: {gaps} offsets reached no caller, {unknown} were requested with an unknown outcome"
        findings.add("offset-gap", detail)


def _check_order(key: str, ops: list[Op], findings: Findings) -> None:
    """A range is above every range that had been assigned before it was requested."""
    ended = sorted(ops, key=lambda op: op.end_ns)
    at, highest = 0, ended[0]
    is_any = False
    for op in sorted(ops, key=lambda op: op.start_ns):
        while at < len(ended) and ended[at].end_ns < op.start_ns:
            if not is_any or ended[at].reply["o"] > highest.reply["o"]:
                highest, is_any = ended[at], True
            at += 1
        if is_any and op.reply["o"] <= highest.reply["o"]:
            detail = f"{key}: {op.reply['o']} although {highest.reply['o']} had been assigned before"
            findings.add("nonmonotonic-assign", detail, highest, op)
