"""Scenarios from TOML: a cluster, its clients and its faults.

Owns the format and its defaults. Unknown keys are refused, so that a typing error cannot switch a fault off.
"""

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from chaos_tests.sim.faults.catalogue import FaultSpec
from chaos_tests.sim.faults.kinds import STRIKES
from chaos_tests.sim.rpc import ClientProfile
from smq.testing.virtual.network import LinkProfile

FOLDER = Path(__file__).parent / "scenarios"


COMPACTED: Final = "+compaction"
COMPACTED_RECORDS: Final = 150  # each partition keeps so many
COMPACTED_NODE: Final[dict[str, Any]] = {
    "retention_check_ms": 500,
    "compaction_check_ms": 400,
    "compaction_segment_bytes": 3_000,
    "compaction_reset_ms": 3_000,
}


class ScenarioError(ValueError):
    """The file is not a scenario; the message names the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    nodes: int = 3
    topics: int = 1
    partitions: int = 2
    replication: int = 3
    seconds: float = 20.0  # of faults; the heal and the final read are extra
    snapshot_entries: int = 120
    disk_ms: tuple[float, float] = (0.1, 2.0)
    drift_max: float = 0.001
    first_start_strikes: int = 0  # crashes and cuts while the cluster begins, each at any moment
    upgrades: bool = False  # there is a feature level 2 (chaos_tests/sim/levels.py), and no node knows it at first
    lost_forever: int = 0  # nodes whose disks do not survive; the storm then ends with a loss of power
    producer_expiration_ms: int = 0  # of the replicated state, below what a cluster accepts; 0: its default
    retention_records: int = 0  # of every topic with records; 0: without a limit
    retention_ms: int = 0
    retention_bytes: int = 0
    compaction_keys: int = 0  # different keys of the records, which are compacted; 0: no record has a key
    tombstone_ms: int = 0  # how long a compacted topic keeps tombstones
    topic_config: dict[str, str] = field(default_factory=dict)  # further settings of every topic with records
    node: dict[str, Any] = field(default_factory=dict)  # settings of NodeConfig, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMix:
    idempotent: int = 2  # acks=all, with retries
    plain: int = 1  # acks=all, one attempt
    crowds: int = 0  # each has many idempotent producers of one batch
    pipelines: int = 2  # acks=all, idempotent, up to five batches in flight
    connected: int = 0  # acks=all, idempotent, up to five batches in flight down one connection
    leader_acks: int = 1  # acks=1, idempotent
    no_acks: int = 1
    consumers: int = 2
    ranges: int = 1
    groups: int = 2  # clients of a group without members
    lag_watchers: int = 0  # ask how far that group is behind
    members: int = 0  # of one group
    brief_members: int = 0  # of another group, in which no member stays
    consumer_members: int = 0  # of a consumer group (KIP-848)
    assigners: int = 0  # of offsets without records, in a topic of their own
    transactors: int = 0  # producers of transactions, two with each transactional id
    rivals: int = 0  # of the transactors, for the offsets of groups
    batch_writers: int = 0  # drivers of apps, two with each checkpoint
    ledger_readers: int = 0  # of what they have committed
    holders: int = 0  # of open transactions, each in a topic of its own that keeps few records
    trimmers: int = 0
    topic_owners: int = 0
    setting_owners: int = 0  # each changes a setting of the cluster
    placers: int = 0  # each makes topics and assigns their replicas
    defaulters: int = 0  # one at most: it changes a default of new topics, and makes topics
    user_owners: int = 0  # each changes the credentials of a user
    rule_owners: int = 0  # each changes what a user may do
    quota_owners: int = 0  # one at most: it changes the quota of each user without one
    noters: int = 0  # each proposes a command of level 2
    streamers: int = 0  # each makes topics, and immediately sends them batches without sequences
    remakers: int = 0  # each makes and deletes topics of one name
    repeaters: int = 0  # as remakers, and each sends its last deletion again once the topic is there again
    mirrors: int = 0  # two of each topic: they copy another cluster's
    think_ms: float = 240.0
    trim_think_ms: float = 3000.0
    trim_to_hwm: float = 0.4
    start_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    about: str
    cluster: ClusterProfile
    clients: ClientMix
    network: dict[str, float]
    client_network: dict[str, float]
    faults: tuple[FaultSpec, ...]


def load(path: Path) -> Scenario:
    """The scenario in a file. ScenarioError names the wrong key."""
    with path.open("rb") as f:
        try:
            raw = tomllib.load(f)
        except tomllib.TOMLDecodeError as e:
            raise ScenarioError(f"{path}: {e}") from e
    known = {"about", "cluster", "clients", "network", "client_network", "fault"}
    if unknown := raw.keys() - known:
        raise ScenarioError(f"{path}: unknown sections {sorted(unknown)}; known: {sorted(known)}")
    return Scenario(
        name=path.stem,
        about=raw.get("about", ""),
        cluster=_build(ClusterProfile, raw.get("cluster", {}), path),
        clients=_build(ClientMix, raw.get("clients", {}), path),
        network=_numbers(LinkProfile, raw.get("network", {}), path),
        client_network=_numbers(ClientProfile, raw.get("client_network", {}), path),
        faults=tuple(_fault(entry, path) for entry in raw.get("fault", [])),
    )


def load_all(folder: Path = FOLDER) -> list[Scenario]:
    return [load(path) for path in sorted(folder.glob("*.toml"))]


def scenario_of(seed: int, scenarios: list[Scenario]) -> Scenario:
    """The scenarios take turns, seed by seed; every third time with compaction. A single one stays as it is."""
    if len(scenarios) == 1:
        return scenarios[0]
    turn, number = divmod(seed, len(scenarios))
    return scenarios[number] if turn % 3 else compacted(scenarios[number])


def compacted(scenario: Scenario) -> Scenario:
    """The same faults and clients, with records that have keys and topics that are compacted and keep what is young.
    Not with a limit of bytes: its judge counts what was there when it was found to be too much."""
    profile = scenario.cluster
    if profile.compaction_keys or profile.retention_bytes:
        return scenario
    kept = profile.retention_records or COMPACTED_RECORDS
    node = {**COMPACTED_NODE, **profile.node}
    cluster = replace(profile, compaction_keys=16, tombstone_ms=4_000, retention_records=kept, node=node)
    return replace(scenario, name=scenario.name + COMPACTED, cluster=cluster)


def find(name: str) -> Scenario:
    """The scenario of this name, or in this file; with compaction if the name ends so."""
    if name.endswith(COMPACTED):
        return compacted(find(name.removesuffix(COMPACTED)))
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        path = Path(name)
    if not path.exists():
        names = ", ".join(p.stem for p in sorted(FOLDER.glob("*.toml")))
        raise ScenarioError(f"no scenario {name!r}: give a file, or one of {names}")
    return load(path)


def _checked(kind: Any, values: dict[str, Any], path: Path) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    if unknown := values.keys() - names:
        raise ScenarioError(f"{path}: unknown keys {sorted(unknown)} for {kind.__name__}; known: {sorted(names)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _build(kind: Any, values: dict[str, Any], path: Path) -> Any:
    return kind(**_checked(kind, values, path))


def _numbers(kind: Any, values: dict[str, Any], path: Path) -> dict[str, float]:
    return {key: float(value) for key, value in _checked(kind, values, path).items()}


def _fault(entry: dict[str, Any], path: Path) -> FaultSpec:
    entry = dict(entry)
    what = entry.pop("what", None)
    if what not in STRIKES:
        raise ScenarioError(f"{path}: unknown fault {what!r}; known: {sorted(STRIKES)}")
    own = {f.name for f in fields(FaultSpec)} - {"what", "options"}
    direct: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items() if key in own}
    options = {key: value for key, value in entry.items() if key not in own}
    return FaultSpec(what=what, options=options, **direct)
