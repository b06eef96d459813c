"""The cluster works again within its bound, once the faults are healed or while they last: no-progress.

Owns the judgement of the `settled` observation, of every operation that began after it, and of each `progress` that a
fault demanded while it lasted.
"""

from chaos_tests.checkers.base import Facts, Findings, Violation

UNCONDITIONAL = ("send", "hwm", "fetch", "commit", "toffset")  # operations that must succeed on a healed cluster
ANSWERED = ("time",)  # these may be refused: they ask one replica, which may be a record behind and says so


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    for event in facts.history.noted("progress"):
        if not event["ok"]:
            findings.add("no-progress", f"during a fault: {event['why']}", event)
    settled_ns: int | None = None
    for event in facts.history.noted("settled"):
        settled_ns = event["t"] if settled_ns is None else settled_ns  # the probes are between the first and the next
        if not event["ok"]:
            findings.add("no-progress", f"after the heal: {event['why']}", event)
            return findings.found
    if settled_ns is None:
        return findings.found
    for function in (*UNCONDITIONAL, *ANSWERED):
        for op in facts.history.of(function):
            is_fine = op.is_ok or (op.kind == "fail" and function in ANSWERED)
            if op.start_ns > settled_ns and not is_fine and not op.request.get("may_fail"):
                findings.add("no-progress", f"a {function} after the cluster had settled did not succeed", op)
    return findings.found
