"""The pages of groups: members, assignments, and the lag in records, bytes and time, drawn over the last hour.

Owns what they show; `service.group_lag` calculates. `console.site` imports it.
"""

import time
from collections.abc import Mapping, Sequence

from smq.clients.lag_totals import lags_by_member, total_of
from smq.coordinator.http.console.history import SAMPLE_S, History
from smq.coordinator.http.console.markup import Content, Markup, facts, link, long_table, tag
from smq.coordinator.http.console.overview import ROWS_MAX, moment
from smq.coordinator.operators.formats import age_text, lag_texts, offsets_text, size_text
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_lag import GroupPosition, Lag, assigned_partitions, lags_of, positions, state_of
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.state import GroupState

TIMEOUT_MS = 5_000
_LAG_HEADS = ("Lag", "Records", "Bytes", "Time")
_WIDTH, _HEIGHT = 600, 100  # of the drawing, in units of its own


async def groups_page(calls: NodeCalls, history: History, after: str) -> list[Markup]:
    state = calls.node.state
    names = sorted(name for name in state.groups if name > after)
    rows = (_group_row(state.groups[name], history) for name in names[:ROWS_MAX] if name in state.groups)
    heads = ("Group", "State", "Members", "Generation", "Offsets", "Lag")
    more = [tag("p", link("Further groups", "groups", after=names[ROWS_MAX - 1]))] if len(names) > ROWS_MAX else []
    return [tag("p", f"Lag as of the last {SAMPLE_S:.0f} seconds."), await long_table("Groups", heads, rows), *more]


def _group_row(group: GroupState, history: History) -> tuple[Content, ...]:
    known = history.lags.get(group.name)
    name, phase = link(group.name, "groups", group.name), state_of(group)
    return name, phase, len(group.members), group.generation, len(group.offsets), known[-1] if known else None


async def group_page(calls: NodeCalls, history: History, group: GroupState) -> list[Markup]:
    state = calls.node.state
    known = list(positions(state, group))
    places, is_whole = known[:ROWS_MAX], len(known) <= ROWS_MAX
    lags = await lags_of(calls, places, TIMEOUT_MS, with_sizes=True, now_ns=time.time_ns())
    assigned = {m.member.member_id: assigned_partitions(state, group, m) for m in group.members.values()}
    owner = {place: member for member, parts in assigned.items() for place in parts}
    slot = coordinator_of(state, group.name)
    summary = facts(
        (
            ("State", state_of(group)),
            ("Generation", group.generation),
            ("Assignor", group.protocol or "-"),
            ("Coordinator", f"node {slot.node}" if slot.node else "none yet"),
            ("Lag", lag_texts(total_of((lag.figures for lag in lags), is_whole=is_whole))[0]),
        )
    )
    figures = {(at.topic, int(at.part.index)): lag.figures for at, lag in zip(places, lags, strict=True)}
    by_member = lags_by_member(assigned, figures, is_whole=is_whole)
    members = (
        (
            *(m.member.member_id, m.member.instance_id or "-", m.member.client_id, m.member.client_host),
            *(len(assigned[m.member.member_id]), *lag_texts(by_member[m.member.member_id])),
        )
        for m in list(group.members.values())
    )
    rows = (_offset_row(at, lag, owner) for at, lag in zip(places, lags, strict=True))
    heads = ("Partition", "Committed", "High water mark", *_LAG_HEADS, "Committed at", "Member")
    return [
        summary,
        drawing(list(history.lags.get(group.name, ()))),
        await long_table("Members", ("Member", "Instance", "Client", "Host", "Partitions", *_LAG_HEADS), members),
        await long_table("Offsets", heads, rows),
    ]


def _offset_row(at: GroupPosition, lag: Lag, owner: Mapping[tuple[str, int], str]) -> tuple[Content, ...]:
    return (
        link(f"{at.topic}/{at.part.index}", "topics", at.topic, "messages", partition=at.part.index),
        at.committed.position if at.committed is not None else None,
        lag.end if lag.is_end_known else f"{lag.end} or more",
        offsets_text(lag.offsets, at.position, lag.end if lag.is_end_known else None),
        lag.records,
        size_text(lag.size_bytes) if lag.size_bytes is not None else None,
        age_text(lag.age_ms),
        moment(at.committed.committed_ms / 1000) if at.committed is not None else None,
        owner.get((at.topic, at.part.index), "-"),
    )


def drawing(samples: Sequence[int]) -> Markup:
    """The lag over time, and its figures in words for a reader who does not see it."""
    if len(samples) < 2:
        return tag("p", f"The lag is drawn once there are two samples, {SAMPLE_S:.0f} seconds apart.")
    top = max(*samples, 1)
    step = _WIDTH / (len(samples) - 1)
    points = " ".join(f"{i * step:.1f},{_HEIGHT - 4 - (_HEIGHT - 8) * lag / top:.1f}" for i, lag in enumerate(samples))
    minutes = (len(samples) - 1) * SAMPLE_S / 60
    words = f"Lag over the last {minutes:.0f} minutes: from {samples[0]:,} to {samples[-1]:,}, at most {max(samples):,}"
    line = tag("polyline", points=points)
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    image = tag("svg", tag("title", words), line, role="img", aria_label=words, viewBox=box, preserveAspectRatio="none")
    return tag("figure", image, tag("figcaption", words))
