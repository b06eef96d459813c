"""Transactions: torn-transaction, lost-transaction, aborted-read, dirty-read, doubled-record, skipped-record,
torn-offsets, lso-back; and CommitBatch: torn-batch, repeated-batch, lost-batch, aborted-read of a batch that was never
committed.

Owns the judgement of `txn`, `tpoll`, `tstable`, `toffset` and `batch` operations. The final committed read of each
partition is what is visible. A transaction is visible whole, in all of its partitions and in its group's offset, or not
at all; what its producer learned of it holds; and no committed reader ever got anything else. Each `batch` is one
attempt at a batch of an app. The attempts at it that stage the same values share their outcome: each value is visible
once, or none is. If the checkpoint has lost what the batch was, others stage other values, and of all these plans at
most one is visible; an attempt that was answered as done stands for its own. Of compacted logs, what `ledgers` puts
back counts as visible.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import replace

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.checkers.groups import check_reads
from chaos_tests.checkers.ledgers import Ledgers
from chaos_tests.history import NEVER_NS, Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    transactions = facts.history.of("txn")
    polls = [op for op in facts.history.of("tpoll") if op.is_ok]
    noted = facts.history.noted("compaction")
    doubtful: list[Op] = []
    if noted:
        ledgers = Ledgers(noted[0], transactions, facts.history.of("batch"), polls, findings)
        visible, required, doubtful = ledgers.shown, ledgers.required, ledgers.doubtful
    else:
        visible = _visible(polls, findings)
        required = {key: sorted(records) for key, records in visible.items()}
    if visible:
        shown = {value for records in visible.values() for value in records.values()}
        seen = [(op, _is_visible(op, shown, findings)) for op in transactions]
        _check_outcomes(seen, findings)
        _check_offsets(facts, seen, doubtful, findings)
        _check_polls(polls, visible, required, findings)
    _check_stable_ends(facts.history.of("tstable"), findings)
    _check_finals(facts.history.of("tpoll"), findings)
    return findings.found


def _visible(polls: list[Op], findings: Findings) -> dict[str, dict[int, int]]:
    """offset -> value, per partition, of the final reads: those of all replicas must be equal."""
    by_replica: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for op in polls:
        if op.request["final"]:
            by_replica[op.request["k"], op.request["n"]].update((offset, value) for offset, value in op.reply["r"])
    visible: dict[str, dict[int, int]] = {}
    for (key, node), records in by_replica.items():
        first = visible.setdefault(key, records)
        if records != first:
            findings.add("torn-transaction", f"{key}: node {node} shows {len(records)} records, another {len(first)}")
    _check_doubles(visible, findings)
    return visible


def _check_doubles(visible: dict[str, dict[int, int]], findings: Findings) -> None:
    """Every value is written once."""
    places: dict[int, str] = {}
    for key, records in visible.items():
        for offset, value in records.items():
            first = places.setdefault(value, f"{key}@{offset}")
            if first != f"{key}@{offset}":
                findings.add("doubled-record", f"{value} is visible at {first} and at {key}@{offset}")


def _is_visible(op: Op, shown: set[int], findings: Findings) -> bool:
    values = [value for of_partition in op.request["v"].values() for value in of_partition]
    found = [value for value in values if value in shown]
    if found and len(found) < len(values):
        findings.add("torn-transaction", f"of {values} only {found} are visible", op)
    return bool(found)


def _check_outcomes(seen: list[tuple[Op, bool]], findings: Findings) -> None:
    for op, is_visible in seen:
        if op.is_ok and op.reply["out"] == "commit" and not is_visible:
            findings.add("lost-transaction", "it was committed and is not visible", op)
        never = op.kind == "fail" or (op.is_ok and op.reply["out"] == "abort")
        if never and is_visible:
            findings.add("aborted-read", "it was not committed and is visible", op)


def _check_offsets(facts: Facts, seen: list[tuple[Op, bool]], doubtful: list[Op], findings: Findings) -> None:
    """In the end the group's offset is that of the last change: a visible transaction that has staged one, or a commit
    of its own. A doubtful transaction may have been committed, and compaction may have removed all its records before
    any client saw them."""
    staged = {op.request["o"]: op for op in facts.history.of("stage")}
    plain, deleted = facts.history.of("commit"), facts.history.of("gdelete")
    for read in facts.history.of("toffset"):
        if not read.is_ok:
            continue
        name, group = read.request["id"], read.request.get("g")
        changes = [op for op in plain if op.request["g"] == group and op.kind != "fail"]
        visible = [op for op, is_visible in seen if is_visible and op.request["id"] == name]
        for kind, transactions in ("ok", visible), ("info", [op for op in doubtful if op.request["id"] == name]):
            for op in transactions:
                if (offset := op.request["off"]) is not None:
                    change = staged.get(offset, op)
                    request, end_ns = {"o": offset}, read.start_ns - 1 if kind == "ok" else NEVER_NS
                    changes.append(replace(change, request=request, kind=kind, end_ns=end_ns))
        tagged = [replace(op, request={"tag": str(op.request["o"])}) for op in changes]
        found = read.reply["off"]
        if found is not None and str(found) not in {op.request["tag"] for op in tagged}:
            findings.add(
                "torn-offsets", f"{name}: the offset is {found}, of no visible transaction and no commit", read
            )
        deletions = [op for op in deleted if op.request["g"] == group and op.kind != "fail"]
        answer = replace(read, reply={"tag": "" if found is None else str(found)})
        check_reads(f"the offset of {name}", tagged, deletions, [answer], findings, "torn-offsets")


def _check_polls(
    polls: list[Op], visible: dict[str, dict[int, int]], required: dict[str, list[int]], findings: Findings
) -> None:
    for op in polls:
        key, start, following = op.request["k"], op.request["o"], op.reply["next"]
        final = visible.get(key)
        if final is None:
            continue
        got = dict(op.reply["r"])
        for offset, value in got.items():
            if final.get(offset) != value:
                findings.add("dirty-read", f"{key}@{offset}: {value} was read, and is not visible at the end", op)
        offsets = required[key]
        for offset in offsets[bisect_left(offsets, start) : bisect_left(offsets, following)]:
            if offset not in got:
                findings.add("skipped-record", f"{key}@{offset} was passed over and is visible at the end", op)


def _check_finals(ops: list[Op], findings: Findings) -> None:
    """In the end, committed readers can read each replica up to its last stable offset. Nothing else judges what could
    not be read."""
    last = {(op.request["k"], op.request["n"]): op for op in ops if op.request["final"]}
    for (key, node), op in last.items():
        if not op.is_ok or op.reply["next"] < op.reply["lso"]:
            findings.add("lost-transaction", f"{key}: node {node} could not be read to its end", op)


def _check_stable_ends(ops: list[Op], findings: Findings) -> None:
    """As the leaders report it, the last stable offset never falls."""
    by_key: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        if op.is_ok:
            by_key[op.request["k"]].append(op)
    for key, reads in by_key.items():
        ended = sorted(reads, key=lambda op: op.end_ns)
        at, highest = 0, 0
        for op in sorted(reads, key=lambda op: op.start_ns):
            while at < len(ended) and ended[at].end_ns < op.start_ns:
                highest = max(highest, ended[at].reply["lso"])
                at += 1
            if op.reply["lso"] < highest:
                findings.add("lso-back", f"{key}: {op.reply['lso']} after {highest}", op)


def check_batches(facts: Facts) -> list[Violation]:
    findings = Findings()
    attempts: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in facts.history.of("batch"):
        attempts[op.request["app"], op.request["id"]].append(op)
    shown = _shown(facts)
    for ops in attempts.values():
        _check_answers(ops, findings)
        if shown is not None:
            plans: dict[tuple[int, ...], list[Op]] = defaultdict(list)
            for op in ops:
                plans[tuple(op.request["v"])].append(op)
            seen = [_is_plan_visible(same, shown, findings) for same in plans.values()]
            if sum(seen) > 1:
                findings.add("repeated-batch", f"{sum(seen)} plans of it are visible", ops[0])
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


def _is_plan_visible(ops: list[Op], shown: Counter[int], findings: Findings) -> bool:
    """Of the attempts that have staged the same values."""
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
    return any(counts.values())
