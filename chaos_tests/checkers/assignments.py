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
    told: dict[str, list[Op]] = defaultdict(list)
    unknown: dict[str, int] = defaultdict(int)
    for op in facts.history.of("assign"):
        if op.is_ok:
            told[op.asked["k"]].append(op)
        elif op.kind == "info":
            unknown[op.asked["k"]] += op.asked["c"]
    for key, ops in told.items():
        _check_ranges(key, ops, unknown[key], findings)
        _check_order(key, ops, findings)
    return findings.found


def _check_ranges(key: str, ops: list[Op], unknown: int, findings: Findings) -> None:
    by_base = sorted(ops, key=lambda op: (op.told["o"], op.told["o"] + op.asked["c"]))
    gaps = 0
    for op, after in pairwise(by_base):
        end = op.told["o"] + op.asked["c"]
        if after.told["o"] < end:
            findings.add("offset-reuse", f"{key}@{after.told['o']} was assigned twice", op, after)
        gaps += max(0, after.told["o"] - end)
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
            if not is_any or ended[at].told["o"] > highest.told["o"]:
                highest, is_any = ended[at], True
            at += 1
        if is_any and op.told["o"] <= highest.told["o"]:
            detail = f"{key}: {op.told['o']} although {highest.told['o']} had been assigned before"
            findings.add("nonmonotonic-assign", detail, highest, op)
