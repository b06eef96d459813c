"""Consumer groups (KIP-848): one owner per partition in the replicated state and for the members, and soon one again.

Owns these anomalies: shared-partition (two members hold a partition in the replicated state, or got it in one epoch, or
one got it while another that lives on had it), wrong-assignment (a member got what the state did not have for it then),
ownerless (after the heal a partition that members want has no owner for too long); and of this protocol
stale-generation and evicted-alive, as in `membership`.
"""

from bisect import bisect_right

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.checkers.membership import SESSION_MS
from chaos_tests.history import NEVER_NS, Event, Op

REBALANCE_MS = 3_000  # of the members that the simulation runs
# A dead owner, then a slow one, and a coordinator that moves.
OWNERLESS_NS = (2 * SESSION_MS + REBALANCE_MS) * 1_000_000
_ALIVE_NS = int(0.9 * min(SESSION_MS, REBALANCE_MS) * 1_000_000)  # clocks drift

_BEHIND_NS = 3_000_000_000  # a coordinator has applied less than other nodes
_NO_ANSWER = (None, "NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE")


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    beats = facts.history.of("cbeat")
    seen = facts.history.noted("consumers")
    taken = [op for op in beats if op.is_ok and op.reply["code"] == "NONE"]
    granted = [op for op in taken if op.request["epoch"] >= 0]
    _check_state(seen, findings)
    _check_ownerless(seen, facts, findings)
    _check_answers(granted, seen, findings)
    _check_use(taken, beats, findings)
    _check_commits(taken, [op for op in facts.history.of("commit") if op.is_ok and "epoch" in op.request], findings)
    _check_evictions(beats, findings)
    return findings.found


def _check_state(seen: list[Event], findings: Findings) -> None:
    for event in seen:
        owners: dict[str, str] = {}
        for member, (_, assigned, revoking) in event["members"].items():
            for part in (*assigned, *revoking):
                if owners.setdefault(part, member) != member:
                    findings.add("shared-partition", f"{part} is {owners[part]}'s and {member}'s", event)


def _check_ownerless(seen: list[Event], facts: Facts, findings: Findings) -> None:
    healed = facts.history.noted("heal")
    if not healed or not seen:
        return
    free: dict[str, int] = {}
    last = {**seen[-1], "t": max(event["t"] for events in facts.history.notes.values() for event in events[-1:])}
    for event in (*seen, last):
        now_ns = max(event["t"], healed[0]["t"])
        for part, since_ns in free.items():
            if now_ns - since_ns > OWNERLESS_NS:
                findings.add("ownerless", f"{part} has had no owner since {since_ns / 1e6:.0f} ms", event)
        held = {part for _, assigned, revoking in event["members"].values() for part in (*assigned, *revoking)}
        free = {part: free.get(part, now_ns) for part in event["wanted"] if part not in held}


def _check_answers(granted: list[Op], seen: list[Event], findings: Findings) -> None:
    """Against each other, and against the state. A static member has one label for all its ids."""
    owners: dict[tuple[str, int, str], Op] = {}
    for op in granted:
        for part in op.reply["parts"]:
            first = owners.setdefault((op.request["g"], op.reply["epoch"], part), op)
            if _label(first) != _label(op):
                findings.add("shared-partition", f"{part} is two members' in epoch {op.reply['epoch']}", first, op)
    given: dict[str, list[tuple[int, tuple[int, list[str]]]]] = {}  # by member: from when on it had this
    for event in seen:
        for member, (epoch, assigned, _) in event["members"].items():
            states = given.setdefault(member, [])
            if not states or states[-1][1] != (epoch, assigned):
                states.append((event["t"], (epoch, assigned)))
    for op in granted:
        states = given.get(op.reply["w"], [])
        ends = [at_ns for at_ns, _ in states[1:]] + [NEVER_NS]
        mine = (op.reply["epoch"], op.reply["parts"])
        spans = [(at_ns, end_ns) for (at_ns, had), end_ns in zip(states, ends, strict=True) if had == mine]
        if not any(at_ns <= op.end_ns and op.start_ns <= end_ns + _BEHIND_NS for at_ns, end_ns in spans):
            findings.add("wrong-assignment", f"{op.reply['w']} got what the state did not have for it", op)


def _label(op: Op) -> str:
    found: str = op.request["i"] or op.reply["w"]
    return found


def _check_use(taken: list[Op], beats: list[Op], findings: Findings) -> None:
    """A member has a partition from the answer that names it until it sends a heartbeat without it. Whether it was
    still a member then shows in its last heartbeat with it that was taken."""
    uses: dict[str, list[tuple[int, int, Op]]] = {}  # by partition: from, to
    current: dict[str, dict[str, tuple[Op, int]]] = {}
    is_taken = {id(op) for op in taken}
    for op in sorted(beats, key=lambda op: op.start_ns):
        mine = current.setdefault(op.request["w"] or op.reply.get("w", ""), {})
        for part in [part for part in mine if part not in op.request["owned"]]:
            first, end_ns = mine.pop(part)
            uses.setdefault(part, []).append((first.end_ns, end_ns, first))
        if id(op) not in is_taken:
            continue
        for part, (first, _) in mine.items():
            mine[part] = (first, op.start_ns)
        for part in op.reply["parts"] if op.request["epoch"] >= 0 else ():
            mine.setdefault(part, (op, op.end_ns))
    for mine in current.values():
        for part, (first, end_ns) in mine.items():
            uses.setdefault(part, []).append((first.end_ns, end_ns, first))
    for part, spans in uses.items():
        spans.sort(key=lambda span: span[0])
        until_ns, holder = -1, None
        for from_ns, to_ns, first in spans:
            if holder is not None and from_ns < until_ns:
                findings.add("shared-partition", f"{part} was given to two members at the same time", holder, first)
            if to_ns > until_ns:
                until_ns, holder = to_ns, first


def _check_commits(taken: list[Op], commits: list[Op], findings: Findings) -> None:
    """Each against the last epoch that its member knew before it began."""
    ended: dict[str, list[Op]] = {}
    for op in sorted(taken, key=lambda op: op.end_ns):
        ended.setdefault(op.reply["w"], []).append(op)
    for op in commits:
        known = ended.get(op.request["w"], [])
        at = bisect_right(known, op.start_ns, key=lambda known: known.end_ns)
        if at and not 0 <= known[at - 1].reply["epoch"] <= op.request["epoch"]:
            detail = f"a commit of epoch {op.request['epoch']} was accepted of a member that is in another"
            findings.add("stale-generation", detail, known[at - 1], op)


def _check_evictions(beats: list[Op], findings: Findings) -> None:
    """A member that had nothing to give up is unknown soon after. What it was asked since, it may have missed."""
    heard: dict[str, Op] = {}
    for op in sorted(beats, key=lambda op: op.start_ns):
        member, code = op.request["w"] or op.reply.get("w", ""), op.reply.get("code")
        before = heard.pop(member, None)
        if before is not None and code == "UNKNOWN_MEMBER_ID" and op.end_ns - before.start_ns < _ALIVE_NS:
            findings.add("evicted-alive", f"{member} is unknown within its session", before, op)
        if code == "NONE" and op.request["epoch"] >= 0 and set(op.request["owned"]) <= set(op.reply["parts"]):
            heard[member] = op
        elif code in _NO_ANSWER and before is not None and op.request["epoch"] > 0:
            heard[member] = before
