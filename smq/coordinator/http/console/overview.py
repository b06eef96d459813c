"""The pages of the cluster, its topics and its settings.

Owns what they show. They read what this node has applied, and say as of when. `console.site` imports it.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Final

from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.http.console.events import Event, EventLog
from smq.coordinator.http.console.history import History
from smq.coordinator.http.console.markup import Content, Markup, facts, joined, link, long_table, table, tag
from smq.coordinator.operators.formats import size_text
from smq.coordinator.service.name_lookup import has_leader
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.turns import Turns
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.state import ClusterState, NodeState, PartitionState, TopicState
from smq.replication.api import NodeApi

ROWS_MAX: Final = 200  # per page: a screen or ten, and less than a millisecond
EVENTS_SHOWN: Final = 10  # on the first page


def moment(at_s: float) -> Markup:
    """Of the wall clock, in UTC."""
    try:
        written = datetime.fromtimestamp(at_s, UTC)
    except (OverflowError, ValueError, OSError):
        return tag("span", f"{at_s:.3f} s after 1970")  # a producer's create time may be anything
    return tag(
        "time", f"{written:%Y-%m-%d %H:%M:%S.}{written.microsecond // 1000:03} UTC", datetime=written.isoformat()
    )


def _good(is_good: bool, good: str, bad: str) -> Markup:
    """Never by colour alone."""
    return tag("span", good if is_good else bad, class_="good" if is_good else "bad")


# ------------------------------------------------------------------------------------------------------ cluster
async def cluster_page(node: NodeApi, events: EventLog) -> list[Markup]:
    status, state = node.status(), node.state
    count = without = 0
    led: dict[int, int] = {}
    async for part in _all_partitions(state):
        count += 1
        without += not has_leader(part, state)
        led[part.leader] = led.get(part.leader, 0) + 1
    raft: Content = f"node {status.raft_leader}, term {status.raft_term}"
    if status.raft_leader is None:
        raft = _good(False, "", "none: nothing can be written until a majority of the nodes runs and is connected")
    summary = facts(
        (
            ("Cluster", state.cluster_id),
            ("Raft leader", raft),
            ("Topics", len(state.topics)),
            ("Partitions", count),
            ("Without a leader", _good(not without, "0", f"{without}")),
            ("Groups", len(state.groups)),
            ("This node", _good(status.is_ready, f"{node.node_id}, ready", f"{node.node_id}, not ready")),
            ("Its disk", f"{size_text(status.storage.free_bytes)} free of {size_text(status.storage.total_bytes)}"),
        )
    )
    rows = [_node_row(number, n, led.get(number, 0), node) for number, n in sorted(state.nodes.items())]
    heads = ("Node", "State", "Leads", "Kafka", "gRPC", "HTTP", "Rack")
    warnings = tag("ul", *(tag("li", warning, class_="bad") for warning in status.warnings), aria_label="Warnings")
    recent = event_table("Last events", list(events.events)[-EVENTS_SHOWN:])
    return [summary, *([warnings] if status.warnings else []), table("Nodes", heads, rows), recent]


def _node_row(number: int, known: NodeState, led: int, node: NodeApi) -> tuple[Content, ...]:
    name = f"{number} (this)" if number == node.node_id else str(number)
    shown = _good(not known.fenced, "runs", "fenced: it is silent")
    if known.drained and not known.fenced:
        shown = tag("span", "drained", class_="warn")  # an operator has done that, and may have forgotten it
    return name, shown, led, known.kafka_address, known.grpc_address, known.http_address, known.rack or "-"


async def _all_partitions(state: ClusterState) -> AsyncIterator[PartitionState]:
    turns = Turns()
    for topic in list(state.topics.values()):
        async for part in turns.over(topic.partitions):
            if not part.is_external:
                yield part


# ------------------------------------------------------------------------------------------------------- topics
async def topics_page(node: NodeApi, history: History, after: str) -> list[Markup]:
    """In order of name, from the one after `after`."""
    names = sorted(name for name in node.state.topics if name > after)
    turns = Turns()
    rows = []
    for name in names[:ROWS_MAX]:
        if (topic := node.state.topics.get(name)) is not None:
            rows.append((*await _topic_row(node, topic, turns), _rate(history, name)))
    heads = ("Topic", "Partitions", "Replicas", "Leaders", "Records", "Stored on this node", "Offsets/s")
    more = [tag("p", link("Further topics", "topics", after=names[ROWS_MAX - 1]))] if len(names) > ROWS_MAX else []
    return [await long_table("Topics", heads, rows), *more]


def _rate(history: History, topic: str) -> Content:
    """Of the last half minute."""
    return _rounded(history.rates.get(topic))


def _rounded(rate: float | None) -> Content:
    return None if rate is None else round(rate)


async def _topic_row(node: NodeApi, topic: TopicState, turns: Turns) -> tuple[Content, ...]:
    """A topic may have thousands of partitions: other tasks run in between."""
    count = stored = without = 0
    async for part in turns.over(list(topic.partitions)):
        count += node.known_hwm(part) - part.log_start
        stored += _stored(node, part)
        without += not part.is_external and not has_leader(part, node.state)
    size = "stored elsewhere" if topic.partitions[0].is_external else size_text(stored)
    leaders = _good(not without, "all", f"{without} without")
    return link(topic.name, "topics", topic.name), len(topic.partitions), topic.replication_factor, leaders, count, size


def _stored(node: NodeApi, part: PartitionState) -> int:
    replica = node.replica_status(part.pid)
    return replica.size_bytes if replica is not None else 0


async def topic_page(node: NodeApi, history: History, topic: TopicState, first: int) -> list[Markup]:
    rows = (_partition_row(node, history, topic.name, p) for p in topic.partitions[first : first + ROWS_MAX])
    heads = (
        "Partition",
        "Leader",
        "Epoch",
        "Replicas",
        "First offset",
        "High water mark",
        "Next offset",
        f"Stored on node {node.node_id} (this)",
        "Offsets/s",
        "",
    )
    facts_shown = facts(
        (
            ("Created", moment(topic.created_ms / 1000)),
            ("Replicas", topic.replication_factor),
            ("Partitions", len(topic.partitions)),
            *sorted(topic.config.items()),
        )
    )
    following = first + ROWS_MAX
    has_more = following < len(topic.partitions)
    more = [tag("p", link("Further partitions", "topics", topic.name, first=following))] if has_more else []
    return [facts_shown, await long_table("Partitions", heads, rows), *more]


def _partition_row(node: NodeApi, history: History, topic: str, part: PartitionState) -> tuple[Content, ...]:
    if part.is_external:
        return str(part.index), "-", part.epoch, "-", part.log_start, part.hwm, part.next_offset, "elsewhere", None, "-"
    is_led = has_leader(part, node.state)
    leader = _good(is_led, str(part.leader), f"none ({part.leader} is away)")
    away = [n for n in part.replicas if (known := node.state.nodes.get(n)) is None or known.fenced]
    replicas = joined([", ".join(map(str, part.replicas)), _good(False, "", f" ({len(away)} away)") if away else ""])
    here = size_text(_stored(node, part)) if node.node_id in part.replicas else "-"
    if part.leader == node.node_id:
        here += ", the leader's copy"
    rate = history.partition_rates.get(part.pid)
    records = link("records", "topics", topic, "messages", partition=part.index)
    hwm = node.known_hwm(part)
    offsets = (part.log_start, hwm, max(part.next_offset, hwm))
    return str(part.index), leader, part.epoch, replicas, *offsets, here, _rounded(rate), records


# ----------------------------------------------------------------------------------------------- settings, events
def settings_page(node: NodeApi, settings: Settings, config: ServerConfig) -> list[Markup]:
    rows = []
    for key in sorted(CLUSTER_CONFIG):
        value, source = settings.layers(node.state, key)[0]
        rows.append((key, value, source.name.lower().replace("_", ".")))
    mine = [
        ("Cluster", config.cluster_id),
        ("Data directory", str(config.data_dir.absolute())),
        ("Rack", config.rack or "-"),
        ("TLS", "on" if config.tls is not None else "off"),
        ("Largest request, bytes", str(config.request_bytes_max)),
        *((f"tuning.{key}", str(value)) for key, value in sorted(config.tuning.items())),
    ]
    return [
        table("Settings of the cluster", ("Setting", "Value", "From"), rows),
        table(f"Settings of node {node.node_id}", ("Setting", "Value"), mine),
    ]


def event_table(caption: str, events: Sequence[Event]) -> Markup:
    """The newest first."""
    return table(caption, ("Time", "Kind", "What"), [(moment(e.at_s), e.kind, e.text) for e in reversed(events)])
