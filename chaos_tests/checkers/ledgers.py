"""Compacted ledgers: lost-key, early-tombstone, resurrected, in what committed readers found at the end.

Owns which records compaction was entitled to remove from the topics that only transactions write: those with a later
committed record of their key, and tombstones after their time. It puts them back, so that the judges of transactions
and of batches see each one whole; an aborted record is never put back, nor does it excuse the absence of a committed
one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from chaos_tests.checkers.base import Findings
from chaos_tests.checkers.compaction import NS_PER_MS
from chaos_tests.history import Event, Op
from chaos_tests.keyed import is_tombstone, key_of

Records: TypeAlias = dict[int, int]  # offset -> value


@dataclass(slots=True)
class Ledger:
    """One partition."""

    committed: Records = field(default_factory=dict)
    began_ns: dict[int, int] = field(default_factory=dict)  # value -> when its transaction began
    doubtful: set[int] = field(default_factory=set)  # keys of tombstones that may have been committed
    finals: list[tuple[Op, Records]] = field(default_factory=list)  # per replica: its last read, all that it found

    def last_of_keys(self, keys: int) -> dict[int, int]:
        """key -> the offset of its last committed record."""
        return {key_of(self.committed[offset], keys): offset for offset in sorted(self.committed)}


class Ledgers:
    """`shown` is what was visible in the end, with what compaction was entitled to remove; `required` are the offsets
    that no committed reader may ever have passed over. Tombstones are not among them: one replica may have dropped its
    own before another was read, and those that go too early are found by themselves."""

    def __init__(
        self, noted: Event, transactions: list[Op], batches: list[Op], polls: list[Op], findings: Findings
    ) -> None:
        self._noted = noted
        self._ledgers: dict[str, Ledger] = defaultdict(Ledger)
        seen = {value for op in polls for _, value in op.reply["r"]}
        self._take_finals(polls)
        transactions = [*transactions, *_tasks_of(batches, polls)]
        self.doubtful = [op for op in transactions if op.kind == "info" and not seen.intersection(_values(op))]
        unseen = {id(op) for op in self.doubtful}
        for op in transactions:
            self._take(op, is_doubtful=id(op) in unseen)
        self.shown: dict[str, Records] = {}
        self.required: dict[str, list[int]] = {}
        for key, ledger in self._ledgers.items():
            if ledger.finals:
                self._judge(key, ledger, findings)

    def _take_finals(self, polls: list[Op]) -> None:
        by_replica: dict[tuple[str, int], tuple[Op, Records]] = {}
        for op in polls:
            if op.request["final"]:
                replica = op.request["k"], op.request["n"]
                _, records = by_replica.get(replica, (op, {}))
                by_replica[replica] = op, records | dict(op.reply["r"])
        for (key, _), found in by_replica.items():
            self._ledgers[key].finals.append(found)

    def _take(self, op: Op, *, is_doubtful: bool) -> None:
        is_committed = op.reply.get("out") == "commit" if op.is_ok else op.kind == "info" and not is_doubtful
        for key, values in op.request["v"].items():
            ledger = self._ledgers[key]
            if is_doubtful:
                ledger.doubtful.update(key_of(v, self._noted["keys"]) for v in values if is_tombstone(v))
            if is_committed and key in op.reply.get("o", {}):
                ledger.committed.update(enumerate(values, op.reply["o"][key]))
                ledger.began_ns.update(dict.fromkeys(values, op.start_ns))

    def _judge(self, key: str, ledger: Ledger, findings: Findings) -> None:
        keys = self._noted["keys"]
        last = ledger.last_of_keys(keys)
        for op, records in ledger.finals:
            for record_key, offset in last.items():
                value = ledger.committed[offset]
                if offset not in records:
                    self._judge_missing(key, ledger, (record_key, offset, value), op, records, findings)
        found = {offset: value for _, records in ledger.finals for offset, value in records.items()}
        self.shown[key] = found | ledger.committed
        self.required[key] = sorted(at for at in last.values() if at in found and not is_tombstone(found[at]))

    def _judge_missing(
        self,
        key: str,
        ledger: Ledger,
        record: tuple[int, int, int],
        op: Op,
        records: Records,
        findings: Findings,
    ) -> None:
        record_key, offset, value = record
        if is_tombstone(value):
            kept_ns = op.end_ns - ledger.began_ns[value]
            if kept_ns < self._noted["tombstone_ms"] * NS_PER_MS * 9 // 10:
                findings.add("early-tombstone", f"{key}@{offset}: the tombstone of key {record_key} is gone", op)
            older = [at for at, v in records.items() if at < offset and key_of(v, self._noted["keys"]) == record_key]
            if older:
                detail = f"{key}@{older[0]} is visible, and the tombstone of its key at {offset} is gone"
                findings.add("resurrected", detail, op)
        elif record_key not in ledger.doubtful:
            findings.add("lost-key", f"{key}@{offset}: {value}, the last of key {record_key}, is gone", op)


def _values(op: Op) -> Iterable[int]:
    return (value for of_partition in op.request["v"].values() for value in of_partition)


def _tasks_of(batches: list[Op], polls: list[Op]) -> Iterator[Op]:
    """The tasks of each batch as transactions of their own: of the attempt that was committed, as far as it is known.
    All attempts stage the same values, each elsewhere, and one of them at most is committed."""
    seen = {(op.request["k"], offset, value) for op in polls for offset, value in op.reply["r"]}
    attempts: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in batches:
        if "o" in op.reply and not op.reply.get("replay"):
            attempts[op.request["app"], op.request["id"]].append(op)
    replayed = {(op.request["app"], op.request["id"]) for op in batches if op.is_ok and op.reply["replay"]}
    for batch, ops in attempts.items():
        known = [op for op in ops if op.is_ok] or [op for op in ops if seen.intersection(_places(op))]
        chosen = (known or ops)[0]
        kind = "ok" if known or batch in replayed else "info"
        for values, offsets in zip(chosen.request["tasks"], chosen.reply["o"], strict=True):
            request, reply = {"id": "", "v": values}, {"out": "commit", "o": offsets}
            yield replace(chosen, kind=kind, request=request, reply=reply)


def _places(op: Op) -> Iterator[tuple[str, int, int]]:
    """Where an attempt at a batch has staged which value."""
    for values, offsets in zip(op.request["tasks"], op.reply["o"], strict=True):
        for key, of_place in values.items():
            for offset, value in enumerate(of_place, offsets[key]):
                yield key, offset, value
