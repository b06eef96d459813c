"""Observations from inside the nodes: states, Raft logs and leaders agree, no node dies or is stranded, queues are
bounded, nothing is proposed too late, no node's own watch notes an anomaly; and the cluster works again within its
bound, once the faults are healed or while they last (no-progress).

Owns the judgement of the nodes' state machines against each other at equal Raft indexes, of what a node did by itself,
of `settled`, of every operation that began after it, and of each `progress` that a fault demanded while it lasted.
"""

from typing import Final

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Event

# What a node must not do by itself: (anomaly, detail), by the observation.
_BY_ITSELF: Final = {
    "died": ("process-died", "node {n}: {err}"),
    "overtaken": ("overtaken", "{err}"),
    "queue": ("queue-over-bound", "node {n}: {size} bytes of records waited for its disk, the bound is {bound}"),
    "false-damage": ("false-damage", "node {n} met {found} damaged batches on a sound disk"),
    "watched": ("watched-{kind}", "node {n} itself: {text}"),
    "late-proposal": ("late-proposal", "node {n} proposed a command after its caller's deadline"),
}


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    history = facts.history
    _check_agreement(history.noted("lead"), "term", "n", "two-leaders-in-term", findings)
    _check_agreement(history.noted("entry"), "i", "d", "log-mismatch", findings)
    _check_agreement(history.noted("digest"), "i", "d", "digest-mismatch", findings)
    _check_local_marks(history.noted("local"), findings)
    for function, (anomaly, detail) in _BY_ITSELF.items():
        for event in history.noted(function):
            findings.add(anomaly.format(**event), detail.format(**event), event)
    for event in history.noted("waits"):
        if event["known"] == 1:  # it has never run a newer smq, so the cluster should have waited for it
            findings.add("stranded-node", f"node {event['n']} was never upgraded, and stopped: {event['why']}", event)
    return findings.found


def _check_agreement(events: list[Event], by: str, value: str, anomaly: str, findings: Findings) -> None:
    """Events with an equal `by` have an equal `value`."""
    first: dict[int, Event] = {}
    for event in events:
        other = first.setdefault(event[by], event)
        if other[value] != event[value]:
            findings.add(anomaly, f"at {by} {event[by]}: {other[value]} and {event[value]}", other, event)


def _check_local_marks(events: list[Event], findings: Findings) -> None:
    """At one Raft index every node has the same HWM, and the HWM never falls as the index grows."""
    marks: dict[str, dict[int, Event]] = {}
    for event in events:
        at = marks.setdefault(event["k"], {})
        other = at.setdefault(event["i"], event)
        if (other["hwm"], other["lo"], other["epoch"]) != (event["hwm"], event["lo"], event["epoch"]):
            findings.add("digest-mismatch", f"{event['k']} differs at index {event['i']}", other, event)
    for key, at in marks.items():
        before: Event | None = None
        for index in sorted(at):
            event = at[index]
            if before is not None and (event["hwm"] < before["hwm"] or event["lo"] < before["lo"]):
                findings.add("hwm-regression", f"{key}: {before['hwm']}, then {event['hwm']}", before, event)
            before = event


UNCONDITIONAL = ("send", "hwm", "fetch", "commit", "toffset")  # operations that must succeed on a healed cluster
ANSWERED = ("time",)  # these may be refused: they ask one replica, which may be a record behind and says so


def check_liveness(facts: Facts) -> list[Violation]:
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
