"""A mirrored topic is a copy: mirror-differs, mirror-lost.

Owns the judgement of `mirror` (a batch of another cluster's log, at its own offset), `own` (of a producer here, after
the copy has ended) and `copy` (all that a replica has in the end). Every batch of a copy is one that was sent, at its
offset and with its bytes, and they touch. None that was acknowledged is missing, and none was acknowledged that would
have changed an offset.
"""

from collections import defaultdict

from chaos_tests.checkers.base import Facts, Findings, Violation
from chaos_tests.history import Op


def check(facts: Facts) -> list[Violation]:
    findings = Findings()
    sent: dict[str, dict[tuple[int, int, int], Op]] = defaultdict(dict)
    acknowledged: dict[str, dict[int, Op]] = defaultdict(dict)
    for op in facts.history.of("mirror"):
        request = op.request
        if request["wrong"]:
            if op.is_ok:
                findings.add("mirror-differs", f"{request['k']}@{request['o']}: other bytes were acknowledged", op)
            continue
        sent[request["k"]][request["o"], request["e"], request["d"]] = op
        if op.is_ok:
            acknowledged[request["k"]][request["o"]] = op
    own: dict[str, dict[int, Op]] = defaultdict(dict)
    for op in facts.history.of("own"):
        own[op.request["k"]][op.request["d"]] = op
    for op in facts.history.of("copy"):
        if op.is_ok:
            _check_own(op, own[op.request["k"]], findings)
            _check_copy(op, sent[op.request["k"]], acknowledged[op.request["k"]], own[op.request["k"]], findings)
    return findings.found


def _check_own(op: Op, own: dict[int, Op], findings: Findings) -> None:
    places = [(base, digest) for base, _, digest in op.reply["b"]]
    for digest, send in own.items():
        if send.is_ok and (send.reply["o"], digest) not in places:
            detail = f"{op.request['k']}@{send.reply['o']} was acknowledged to a producer, and is not in the copy"
            findings.add("mirror-lost", detail, send, op)


def _check_copy(
    op: Op,
    sent: dict[tuple[int, int, int], Op],
    acknowledged: dict[int, Op],
    own: dict[int, Op],
    findings: Findings,
) -> None:
    key, found = op.request["k"], op.reply["b"]
    end = found[0][0] if found else 0
    written = set[int]()
    for base, stop, digest in found:
        is_own = digest in own and digest not in written
        is_sent = is_own or ((base, stop, digest) in sent and not written)
        if base != end or not is_sent:
            findings.add("mirror-differs", f"{key}@{base}: this batch was never sent there, or does not touch", op)
        if is_own:
            written.add(digest)
        end = stop
    bases = {base for base, _, _ in found}
    for base, send in acknowledged.items():
        if base not in bases:
            findings.add("mirror-lost", f"{key}@{base} was acknowledged, and is not in the copy", send, op)
