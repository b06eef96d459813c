"""How far groups are behind, as text and as JSON: a group's line, its members, its partitions, and totals.

Owns what the figures look like: an unknown part is never shown as zero. Pure. The commands that show lag import it.
"""

import json
from dataclasses import asdict
from typing import Final

from smq.clients.lag_totals import LagTotal
from smq.clients.types import GroupDescription, GroupMember
from smq.coordinator.cli.common import end_text
from smq.coordinator.cli.tables import Table
from smq.coordinator.operators.formats import age_text, lag_texts, number_text, offsets_text, size_text

TOTAL_COLUMNS: Final = ("lag", "bytes", "time")
_ALL_COLUMNS: Final = ("lag", "records", "bytes", "time")


def total_cells(total: LagTotal) -> tuple[str, str, str]:
    offsets, _, size, age = lag_texts(total)
    return offsets, size, age


def total_text(total: LagTotal) -> str:
    offsets, size, age = total_cells(total)
    return f"{offsets} ({size}, {age})"


def headline(found: GroupDescription) -> str:
    summary = found.summary
    coordinator = f", coordinated by node {found.coordinator}" if found.coordinator is not None else ""
    protocol = f", assignor {found.protocol}" if found.protocol else ""
    lag, *_ = lag_texts(found.lag_total)
    return f"{summary.name}: {summary.state}, generation {summary.generation}{protocol}{coordinator}; lag {lag}"


def member_table(found: GroupDescription) -> Table:
    table = Table("member", "instance", "client", "host", "session", "partitions", *_ALL_COLUMNS)
    lags = found.lags_by_member()
    for m in found.members:
        client, host, session = m.client_id or "-", m.client_host or "-", f"{m.session_timeout_ms} ms"
        cells = lag_texts(lags[m.member_id])
        table.add_row(m.member_id, m.instance_id or "-", client, host, session, _partitions(m), *cells)
    return table


def lag_table(found: GroupDescription) -> Table:
    table = Table("topic", "partition", "committed", "high water mark", *_ALL_COLUMNS, "member")
    for p in found.positions:
        owner = next((m.member_id for m in found.members if (p.topic, p.partition) in m.partitions), "-")
        end = end_text(p.hwm, is_known=p.is_end_known)
        lag = (
            offsets_text(p.lag, p.offset, p.hwm if p.is_end_known else None),
            number_text(p.lag_records),
            size_text(p.lag_bytes),
            age_text(p.lag_ms),
        )
        table.add_row(p.topic, str(p.partition), number_text(p.offset), end, *lag, owner)
    return table


def document(found: GroupDescription) -> str:
    lags = found.lags_by_member()
    members = [asdict(m) | total_fields(lags[m.member_id]) for m in found.members]
    return json.dumps(asdict(found) | {"members": members} | total_fields(found.lag_total))


def total_fields(total: LagTotal) -> dict[str, int | None]:
    """Null if a part is not known; `lag_at_least` is what is known of the offsets."""
    return {
        "lag": total.offsets.value,
        "lag_at_least": total.offsets.at_least,
        "lag_records": total.records.value,
        "lag_bytes": total.size_bytes.value,
        "lag_ms": total.age_ms.value,
    }


def _partitions(member: GroupMember) -> str:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in member.partitions:
        by_topic.setdefault(topic, []).append(partition)
    return "; ".join(f"{topic} {', '.join(map(str, parts))}" for topic, parts in by_topic.items()) or "-"
