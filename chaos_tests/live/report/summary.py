"""The summary of a history, `summary.json`: its faults, its operations, its findings.

Owns its format, the counting of operations and the commit that it names. It must never judge.
"""

import json
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chaos_tests.history import OBSERVER, Event
from chaos_tests.keyed import GONE
from chaos_tests.live.fleet import Fleet
from chaos_tests.live.load.grpc import Ack

SUMMARY: Final = "summary.json"


@dataclass(slots=True)
class Struck:
    """One fault and its effects. Times in seconds since the run began; None if there is nothing to measure."""

    name: str
    family: str
    nodes: list[int]
    led: list[str]  # partitions that these nodes led
    start_s: float
    end_s: float = 0.0
    says: str = ""
    keeps_majority: bool = True
    acks_during: int = 0
    failover_ms: float | None = None  # from the strike to another's acknowledgement in every partition led there
    flips: int = 0
    told: list[str] = field(default_factory=list)
    recovery_ms: float | None = None  # from its end to an acknowledgement in every partition and all nodes ready


@dataclass(slots=True)
class Summary:
    """summary.json. `violations` are the findings; `is_valid` says whether there was enough to find anything."""

    scenario: str
    seed: int
    commit: str
    nodes: int
    network: str
    disks: str
    python: str
    planted: str | None
    started: str  # UTC
    workload: list[str] = field(default_factory=list)  # kinds of clients
    seconds: float = 0.0
    fault_seconds: float = 0.0
    faults: list[Struck] = field(default_factory=list)
    operations: dict[str, dict[str, int]] = field(default_factory=dict)  # function -> ok, fail, info
    acked_sends: int = 0
    acked_records: int = 0
    records_read: int = 0
    records_deleted: int = 0  # by retention
    records_compacted: int = 0  # away, as some reader saw
    settle_ms: float | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    anomalies: dict[str, int] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    replay: str = ""

    @property
    def is_valid(self) -> bool:
        return not self.invalid

    @property
    def holds(self) -> bool:
        return self.is_valid and not self.violations


def failover_ms(acks: Iterable[Ack], struck: Struck, struck_ns: int, ended_ns: int) -> float | None:
    """From the strike to an acknowledgement in each partition that the struck nodes led: by another node, or by any
    node after the fault's end. Earlier acknowledgements by struck nodes were under way, or no failover was needed."""
    first: dict[str, int] = {}
    for ack in list(acks):
        is_others = ack.node and ack.node not in struck.nodes
        if ack.at_ns > ended_ns or (ack.at_ns > struck_ns and is_others):
            first.setdefault(ack.key, ack.at_ns)
    if not first.keys() >= set(struck.led):
        return None
    return max((first[key] - struck_ns) / 1e6 for key in struck.led)


def count(summary: Summary, events: list[Event]) -> None:
    counts: dict[str, Counter[str]] = {}
    asked: dict[int, Event] = {}
    starts: dict[str, int] = {}
    gone: dict[str, set[int]] = {}
    for event in events:
        if event["f"] == "start":
            starts[event["k"]] = event["lo"]
        if event["p"] == OBSERVER:
            continue
        if event["ty"] == "invoke":
            asked[event["p"]] = event
            continue
        counts.setdefault(event["f"], Counter())[event["ty"]] += 1
        requested = asked.pop(event["p"])
        if event["f"] == "send" and event["ty"] == "ok" and requested["acks"] == -1:
            summary.acked_sends += 1
            summary.acked_records += len(requested["v"])
        elif event["f"] == "poll" and event["ty"] == "ok":
            missing = {o for base, _, values, *_ in event["b"] for o, v in enumerate(values, base) if v == GONE}
            summary.records_read += sum(len(batch[2]) for batch in event["b"]) - len(missing)
            gone.setdefault(requested["k"], set()).update(missing)
    summary.records_deleted = sum(starts.values())
    summary.records_compacted = sum(map(len, gone.values()))
    summary.operations = {function: dict(found) for function, found in sorted(counts.items())}


def new_summary(scenario: str, seed: int, fleet: Fleet, planted: str | None) -> Summary:
    return Summary(
        scenario=scenario,
        seed=seed,
        commit=_commit(),
        nodes=fleet.size,
        network=fleet.network.name,
        disks=fleet.disks.name,
        python=platform.python_version(),
        planted=planted,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _commit() -> str:
    """The checkout's commit, with a + if it has changes; "" outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def read_summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
