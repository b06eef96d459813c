"""What an administrator changes stays as it was acknowledged.

Its violations: stale-setting, wrong-replicas, wrong-default, wrong-address. Owns the judgement of `set` and `setting`,
`place` and `placed`, `make` and `made`, `advertise` and `told`. Each setting and each topic has one writer, which makes
one change at a time. So a look shows the last change that was acknowledged before it began, or one that began later.
"""

from collections import defaultdict
from typing import Any

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    sets = _by_name(facts.history.of("set"))
    for look in facts.history.of("setting"):
        if look.is_ok:
            _check_value(sets.get(look.request["name"], []), look, findings, "stale-setting")
    makes = _by_name(facts.history.of("make"))
    for look in facts.history.of("made"):
        if look.is_ok:
            _check_value(makes.get(look.request["name"], []), look, findings, "wrong-default")
    places = _by_name(facts.history.of("place"))
    for look in facts.history.of("placed"):
        if look.is_ok:
            _check_replicas(places.get(look.request["name"], []), look, findings)
    _check_addresses(facts, findings)
    return findings.found


def _check_addresses(facts: Facts, findings: Findings) -> None:
    """After the nodes have settled, all of them know what each one's last process advertised. The last process of a
    node that has been lost may not have reached them."""
    advertised = {event["n"]: event["address"] for event in facts.history.noted("advertise")}
    faults = facts.history.noted("fault")
    lost = {node for event in faults if event["what"] == "lost-forever" for node in event["nodes"]}
    for event in facts.history.noted("told"):
        if event["of"] not in lost and event["seen"] != [advertised.get(event["of"])]:
            detail = f"node {event['of']} advertises {advertised.get(event['of'])}, and {event['seen']} is known of it"
            findings.add("wrong-address", detail, event)


def _by_name(ops: list[Op]) -> dict[str, list[Op]]:
    """In the order of invocation, without those that failed."""
    found = defaultdict(list)
    for op in ops:
        if op.kind != "fail":
            found[op.request["name"]].append(op)
    return found


def _acknowledged(changes: list[Op], look: Op) -> int:
    """How many changes were acknowledged before the look."""
    return sum(change.is_ok and change.end_ns < look.start_ns for change in changes)


def _begun(changes: list[Op], look: Op) -> int:
    """How many changes had begun when the look ended."""
    return sum(change.start_ns < look.end_ns for change in changes)


def _check_value(changes: list[Op], look: Op, findings: Findings, anomaly: str) -> None:
    acknowledged, begun = _acknowledged(changes, look), _begun(changes, look)
    values = ["", *(change.request["v"] for change in changes)]
    if look.reply["seen"] not in values[acknowledged : begun + 1]:
        detail = f"{look.request['name']} was {values[acknowledged]!r}, and {look.reply['seen']!r} was read"
        findings.add(anomaly, detail, *changes[acknowledged - 1 : acknowledged], look)


def _check_replicas(changes: list[Op], look: Op, findings: Findings) -> None:
    """The topic is deleted only after its last look."""
    possible: list[list[Any]] = [[]]
    for change in changes:
        possible.append(possible[-1] + change.request["r"])
    if look.reply["seen"] not in possible[_acknowledged(changes, look) : _begun(changes, look) + 1]:
        detail = f"{look.request['name']} has the replicas {look.reply['seen']}, not those that were assigned"
        findings.add("wrong-replicas", detail, *changes, look)
