"""Start positions: the seven offset types by name, and their look-up at a partition's replicas.

Owns how a start position is written (`Start`) and resolved. The server owns the table of positions itself. The
consumer, the admin client and the command line import it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias, TypedDict, Unpack

from smq.clients.arguments import (
    INT64_MAX,
    Instant,
    check_int,
    check_name,
    check_partition,
    instant_ms,
    instant_ns,
    invalid,
    shown,
)
from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.errors import build, error_from_detail
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import ISOLATIONS, Isolation, ListedOffset, TopicPartition
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset

OFFSET_TYPES: Final = tuple(name for name in pb.OffsetType.keys() if name != "OFFSET_TYPE_UNSPECIFIED")  # noqa: SIM118 an enum wrapper, no dict
_NEEDS_VALUE: Final = frozenset({"EXACT_OFFSET", "RESET_TO_OFFSET", "EXACT_TS_NS"})
_NEEDS_GROUP: Final = frozenset({"RESUME_OR_EARLIEST", "RESUME_OR_LATEST"})
_SHORT: Final = {"earliest": "RESET_TO_EARLIEST", "latest": "RESET_TO_LATEST"}  # the words that Kafka's users know
LIST_PARTITIONS_MAX: Final = 500  # of one ListOffsets request: below the server's cap


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAt:
    """`type` is the name of an OffsetType, or "earliest" or "latest"; `value` its offset, or the time of EXACT_TS_NS
    (nanoseconds, or a datetime).

    `strict` (as for a plain integer): the offset must be within [lo, hi], as in a seek. `timestamp_ms` replaces the
    type: the first record whose create time is at or after it."""

    type: str = "RESET_TO_OFFSET"
    value: int | datetime = 0
    strict: bool = False
    timestamp_ms: int | datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A checked start, as requests carry it."""

    type: str
    value: int = 0
    strict: bool = False
    timestamp_ms: int | None = None
    stable: bool = False  # OFFSET_STAGED while an open transaction has staged the group's offset


class LookUp(TypedDict):
    """How starts are looked up. `reset_if_gone`: a position that retention has passed means the log start."""

    group: str | None
    reset_if_gone: bool
    isolation: Isolation
    timeout_ms: float


Start: TypeAlias = int | str | datetime | timedelta | tuple[str, int | datetime] | StartAt


def offset_type(name: object) -> str:
    """The OffsetType's name, of its name in any case, or of "earliest" or "latest": one spelling rule for the command
    line and Python. INVALID_REQUEST."""
    if isinstance(name, str):
        found = _SHORT.get(name.lower(), name.upper())
        if found in OFFSET_TYPES:
            return found
    known = ", ".join((*_SHORT, *OFFSET_TYPES))
    raise invalid(f"start: {shown(name)} is no offset type: use one of {known}")


def parse_start(start: Start, *, group: str | None) -> Wanted:
    """5, "earliest", "RESET_TO_LATEST", ("EXACT_TS_NS", 1700000000000000000), a datetime or a timedelta (the first
    record whose create time is at or after it, or so long ago), or a StartAt. INVALID_REQUEST for anything else."""
    if isinstance(start, StartAt):
        parsed = start
    elif isinstance(start, timedelta):
        parsed = StartAt(timestamp_ms=datetime.now(UTC) - start)
    elif isinstance(start, datetime):
        parsed = StartAt(timestamp_ms=start)
    elif isinstance(start, int) and not isinstance(start, bool):
        parsed = StartAt(value=start, strict=True)
    elif isinstance(start, str):
        parsed = StartAt(type=start)
    elif isinstance(start, tuple) and len(start) == 2:
        parsed = StartAt(type=start[0], value=start[1])
    else:
        raise invalid(f"start: {shown(start)} is no position: give an offset, an offset type or a datetime")
    kind = offset_type(parsed.type)
    if isinstance(start, str) and kind in _NEEDS_VALUE:
        raise invalid(f"{kind} needs a value: write ({kind!r}, value)")
    if kind in _NEEDS_GROUP and not group:
        raise invalid(f"{kind} resumes a group: name the group")
    return Wanted(
        type=kind,
        value=_value(kind, parsed.value),
        strict=parsed.strict,
        timestamp_ms=None if parsed.timestamp_ms is None else instant_ms("timestamp_ms", parsed.timestamp_ms),
    )


def _value(kind: str, value: object) -> int:
    if kind == "EXACT_TS_NS":
        return instant_ns(f"the value of {kind}", value)
    if kind not in _NEEDS_VALUE:
        return 0
    check_int(f"the value of {kind}", value, -INT64_MAX - 1)
    assert isinstance(value, int)
    return value


def parse_starts(starts: object, *, group: str | None) -> dict[TopicPartition, Wanted]:
    """A mapping of (topic, partition) to starts. INVALID_REQUEST for anything else."""
    if not isinstance(starts, Mapping):
        raise invalid(f"starts must be a mapping of (topic, partition) to a start, not {shown(starts)}")
    for tp in starts:
        check_partition("starts", tp)
    return {tp: parse_start(start, group=group) for tp, start in starts.items()}


def check_end_name(end: str) -> None:
    """INVALID_REQUEST for a word that names no end."""
    if end != "latest":
        raise SmqError(ErrorCode.INVALID_REQUEST, f'end_offset must be an offset or "latest", not {end!r}')


def checked_ends(ends: Mapping[TopicPartition, int], assigned: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """INVALID_REQUEST for an end that is no offset, or of a partition that is not assigned."""
    for tp, end in ends.items():
        if tp not in assigned:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"end_offset names {tp}, which is not among the partitions")
        if isinstance(end, bool) or not isinstance(end, int) or end < 0:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"end_offset of {tp} must be 0 or more, not {end!r}")
    return dict(ends)


async def resolve_starts(
    cluster: ClusterClient, starts: Mapping[TopicPartition, Wanted], **how: Unpack[LookUp]
) -> dict[TopicPartition, ListedOffset]:
    """Every partition's position, or the first SmqError. Asks again, within `timeout_ms`, while an error may pass."""
    found = {}
    for tp, listed in (await look_up_starts(cluster, starts, **how)).items():
        if isinstance(listed, ListedOffset):
            found[tp] = listed
        elif not listed.code.is_retriable:
            raise listed
    rest = [tp for tp in starts if tp not in found]
    singles = await asyncio.gather(*(_ask_one(cluster, _ask(tp, starts[tp], how), how) for tp in rest))
    found.update(zip(rest, singles, strict=True))
    for tp, start in starts.items():
        _check_strict(tp, start, found[tp])
    return found


async def look_up_starts(
    cluster: ClusterClient, starts: Mapping[TopicPartition, Wanted], **how: Unpack[LookUp]
) -> dict[TopicPartition, ListedOffset | SmqError]:
    """Every partition's position, or why it has none now. Asks the leaders once, several partitions per call."""
    unknown = sorted({tp[0] for tp in starts if cluster.metadata.partition(*tp) is None})
    missing = await cluster.refresh(unknown, timeout_ms=how["timeout_ms"]) if unknown else ()
    found: dict[TopicPartition, ListedOffset | SmqError] = {
        tp: SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {tp[0]!r}") for tp in starts if tp[0] in missing
    }
    asks = {tp: _ask(tp, start, how) for tp, start in starts.items() if tp not in found}
    return found | await _ask_together(cluster, asks, how)


def _ask(tp: TopicPartition, start: Wanted, how: LookUp) -> pb.ListOffsetsPartition:
    return build(
        pb.ListOffsetsPartition,
        topic=tp[0],
        partition=tp[1],
        offset_type=pb.OffsetType.Value(start.type),
        offset_value=start.value,
        group=how["group"] or "",
        reset_if_gone=how["reset_if_gone"],
        timestamp_ms=start.timestamp_ms,
        stable=start.stable,
    )


def _check_strict(tp: TopicPartition, start: Wanted, listed: ListedOffset) -> None:
    if start.strict and listed.clamped:
        message = f"offset {start.value} of {tp[0]}/{tp[1]} is outside the range {listed.lo} to {listed.hi}"
        details = ErrorDetails(lo=Offset(listed.lo), hi=Offset(listed.hi))
        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, message, details)


async def _ask_together(
    cluster: ClusterClient, asks: Mapping[TopicPartition, pb.ListOffsetsPartition], how: LookUp
) -> dict[TopicPartition, ListedOffset | SmqError]:
    """One call per leader."""
    found: dict[TopicPartition, ListedOffset | SmqError] = {}
    groups: dict[str, list[pb.ListOffsetsPartition]] = {}
    for tp, ask in asks.items():
        found[tp] = SmqError(ErrorCode.LEADER_UNAVAILABLE, "no node is known to serve it now")
        for address in cluster.metadata.replica_addresses(*tp, now_ms())[:1]:
            groups.setdefault(address, []).append(ask)
    chunks = [
        (address, group[i : i + LIST_PARTITIONS_MAX])
        for address, group in groups.items()
        for i in range(0, len(group), LIST_PARTITIONS_MAX)
    ]
    answers = await asyncio.gather(*(_ask_chunk(cluster, a, chunk, how) for a, chunk in chunks))
    for answer in answers:
        found |= answer
    return found


async def _ask_chunk(
    cluster: ClusterClient, address: str, asks: Sequence[pb.ListOffsetsPartition], how: LookUp
) -> dict[TopicPartition, ListedOffset | SmqError]:
    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListOffsetsResponse:
        return await node.broker.ListOffsets(_request(asks, how["isolation"], node_ms), timeout=call_s)

    outcome = await cluster.attempt(run, address, how["timeout_ms"])
    if isinstance(outcome, SmqError):
        return {(ask.topic, ask.partition): outcome for ask in asks}
    return {(answer.topic, answer.partition): _listed(answer) for answer in outcome[0].offsets}


async def _ask_one(cluster: ClusterClient, ask: pb.ListOffsetsPartition, how: LookUp) -> ListedOffset:
    async def run(node: NodeStubs, node_ms: int, call_s: float) -> ListedOffset:
        answer = (await node.broker.ListOffsets(_request([ask], how["isolation"], node_ms), timeout=call_s)).offsets[0]
        listed = _listed(answer)
        if isinstance(listed, SmqError):
            raise listed
        return listed

    def candidates() -> list[str]:
        return cluster.metadata.replica_addresses(ask.topic, ask.partition, now_ms()) or cluster.any_node()

    return await cluster.call(run, timeout_ms=how["timeout_ms"], candidates=candidates, topics=(ask.topic,))


def _request(asks: Sequence[pb.ListOffsetsPartition], isolation: Isolation, timeout_ms: int) -> pb.ListOffsetsRequest:
    return pb.ListOffsetsRequest(partitions=asks, isolation=ISOLATIONS[isolation], timeout_ms=timeout_ms)


def _listed(answer: pb.ListedOffset) -> ListedOffset | SmqError:
    if answer.HasField("error"):
        return error_from_detail(answer.error)
    return ListedOffset(offset=answer.offset, clamped=answer.clamped, lo=answer.lo, hi=answer.hi)


def starts_of(partitions: object, start: Start | None, *, group: str | None) -> dict[str | TopicPartition, Wanted]:
    """What a caller assigns: a topic, a list of topics and partitions that begin at `start`, or a mapping to starts.
    INVALID_REQUEST for anything else."""
    default: Start = "RESUME_OR_EARLIEST" if group else "RESET_TO_EARLIEST"
    given = {partitions: start} if isinstance(partitions, str) else partitions
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise invalid(f"partitions must be a topic or a list of (topic, partition), not {shown(given)}")
    if isinstance(given, Mapping):
        if start is not None and given is partitions:
            raise invalid("start: the mapping has a start for each partition already")
        pairs = list(given.items())
    else:
        pairs = [(each, start) for each in given]
    for each, _ in pairs:
        check_name("partitions", each) if isinstance(each, str) else check_partition("partitions", each)
    return {each: parse_start(default if s is None else s, group=group) for each, s in pairs}


async def expanded(
    cluster: ClusterClient, starts: Mapping[str | TopicPartition, Wanted], timeout_ms: float
) -> dict[TopicPartition, Wanted]:
    """With the partitions of the topics that are named as a whole; a partition that is named itself wins.
    UNKNOWN_TOPIC."""
    out: dict[TopicPartition, Wanted] = {}
    for topic in starts:
        if isinstance(topic, str):
            if await cluster.refresh((topic,), timeout_ms=timeout_ms):
                raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
            count = cluster.metadata.partition_count(topic) or 0
            out |= {(topic, index): starts[topic] for index in range(count)}
    return out | {each: start for each, start in starts.items() if not isinstance(each, str)}


async def ends_of(
    resolve: Callable[[dict[TopicPartition, Wanted]], Awaitable[dict[TopicPartition, int]]],
    partitions: list[TopicPartition],
    end_offset: int | str | Mapping[TopicPartition, int] | None,
    until_ms: Instant | None,
) -> dict[TopicPartition, int]:
    """The ends of those that have one."""
    ends: dict[TopicPartition, int] = {}
    if isinstance(end_offset, str):
        check_end_name(end_offset)
        ends = await resolve(dict.fromkeys(partitions, parse_start("RESET_TO_LATEST", group=None)))
    elif end_offset is not None:
        given = end_offset if isinstance(end_offset, Mapping) else dict.fromkeys(partitions, end_offset)
        ends = checked_ends(given, partitions)
    if until_ms is not None:
        until = parse_start(StartAt(timestamp_ms=instant_ms("until_ms", until_ms)), group=None)
        timed = await resolve(dict.fromkeys(partitions, until))
        ends = {tp: min(found, ends.get(tp, found)) for tp, found in timed.items()}
    return ends
