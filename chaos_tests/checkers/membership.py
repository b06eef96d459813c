"""Groups with members: one generation at a time, one member per partition, no live member evicted.

Owns these anomalies: stale-generation (a commit was accepted although a member knew of a later generation before the
commit began), split-generation (one generation has two leaders or two sets of members), shared-partition (two members
have one partition in the same generation), evicted-alive (a member is unknown within its session after a sign of life)
and phantom-member (the only member left does not get all partitions).
"""

from typing import Any

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Op

SESSION_MS = 4_000  # of the members that the simulation runs
_SESSION_NS = SESSION_MS * 1_000_000
_DRIFT = 0.9  # share of a session that has passed when a fast clock says that all of it has
_GONE = ("UNKNOWN_MEMBER_ID", "UNKNOWN_MEMBER")


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    joins = [op for op in facts.history.of("gjoin") if op.is_ok]
    _check_generations(joins, findings)
    _check_shares([op for op in facts.history.of("gsync") if op.is_ok], findings)
    commits = [op for op in facts.history.of("commit") if op.is_ok and "gen" in op.request]
    for group in sorted({op.request["g"] for op in commits}):
        ended = [op for op in joins if op.request["g"] == group]
        _check_commits(ended, [op for op in commits if op.request["g"] == group], findings)
    _check_evictions(facts, findings)
    for event in facts.history.noted("galone"):
        if event["held"] != event["live"]:
            detail = f"alone in the group, a member holds {event['held']} of {event['live']}"
            findings.add("phantom-member", detail, event)
    return findings.found


def _check_generations(joins: list[Op], findings: Findings) -> None:
    leaders: dict[tuple[str, int], Op] = {}
    members: dict[tuple[str, int], Op] = {}
    for op in joins:
        key = (op.request["g"], op.reply["gen"])
        first = leaders.setdefault(key, op)
        if first.reply["leader"] != op.reply["leader"]:
            findings.add("split-generation", f"generation {key[1]} has two leaders", first, op)
        if op.reply["members"]:
            first = members.setdefault(key, op)
            if sorted(first.reply["members"]) != sorted(op.reply["members"]):
                findings.add("split-generation", f"generation {key[1]} has two sets of members", first, op)


def _check_shares(syncs: list[Op], findings: Findings) -> None:
    owners: dict[tuple[str, int, str], Op] = {}
    for op in syncs:
        for part in op.reply["parts"]:
            first = owners.setdefault((op.request["g"], op.request["gen"], part), op)
            if first.reply["who"] != op.reply["who"]:
                findings.add("shared-partition", f"{part} is two members' in generation {op.request['gen']}", first, op)


def _check_commits(joins: list[Op], taken: list[Op], findings: Findings) -> None:
    """Compares commits of one group with the highest generation that a member knew before the commit began."""
    ended = sorted(joins, key=lambda op: op.end_ns)
    at, highest = 0, None
    for op in sorted(taken, key=lambda op: op.start_ns):
        while at < len(ended) and ended[at].end_ns < op.start_ns:
            if highest is None or ended[at].reply["gen"] > highest.reply["gen"]:
                highest = ended[at]
            at += 1
        if highest is not None and op.request["gen"] < highest.reply["gen"]:
            detail = f"a commit of generation {op.request['gen']} was accepted in generation {highest.reply['gen']}"
            findings.add("stale-generation", detail, highest, op)


def _check_evictions(facts: Facts, findings: Findings) -> None:
    """A sign of life counts from the time it was sent, and only if its answer was no error."""
    heard: dict[str, Op] = {}
    ops: list[Op] = []
    for function in ("gbeat", "gsync", "gleave", "gjoin", "commit"):
        ops += [op for op in facts.history.of(function) if op.request.get("m")]
    for op in sorted(ops, key=lambda op: op.start_ns):
        member: Any = op.request["m"]
        if op.function == "gleave" or op.function == "gjoin":
            heard.pop(member, None)  # from here on it may have left by itself, or is in a rebalance
            continue
        code = op.reply.get("code") if op.function == "gbeat" else op.reply.get("err")
        before = heard.get(member)
        if code in _GONE and before is not None and op.end_ns - before.start_ns < _SESSION_NS * _DRIFT:
            findings.add("evicted-alive", f"{member} is unknown within its session", before, op)
        if (op.function == "gbeat" and code == "NONE") or (op.is_ok and op.function in ("gsync", "commit")):
            heard[member] = op
        else:
            heard.pop(member, None) if code not in (None, "NONE") else None
