"""The ways out of a mirror: what arrived here flows back to the source, or the source is gone.

Owns what is written to the source: records that it lacks, at the offsets that they have here, and groups' commits. No
client can choose an offset there, so each answer is compared. `commands.mirror` imports it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from smq.clients import Admin
from smq.clients.types import KAFKA_GROUP_PREFIX
from smq.coordinator.cli.mirror.comparing import batches_of, compare
from smq.coordinator.cli.mirror.copying import COMPARED_OFFSETS
from smq.coordinator.cli.mirror.kafka_side import KafkaSide, Place, client_options
from smq.coordinator.cli.mirror.settings import MirrorSettings
from smq.coordinator.cli.mirror.target import Target
from smq.coordinator.user_errors import UserError
from smq.records import PREFIX_BYTES, BatchHeader, decode_batch, marker_batch, parse_header, patched_prefix

BATCH_BYTES_MAX: Final = 100 << 20


@asynccontextmanager
async def source_producer(settings: MirrorSettings) -> AsyncIterator[AIOKafkaProducer]:
    options = client_options(settings.source)
    producer = AIOKafkaProducer(
        enable_idempotence=True, max_batch_size=BATCH_BYTES_MAX, max_request_size=BATCH_BYTES_MAX, **options
    )
    async with producer:
        yield producer


async def give_back(there: KafkaSide, here: KafkaSide, producer: AIOKafkaProducer, place: Place) -> int:
    """Sends the source what it lacks of a partition, in order; the number of records. Its end is the position, so this
    can be interrupted and run again."""
    topic, partition = place
    (_, end), (first, own_end) = await there.bounds(place), await here.bounds(place)
    where = f"{topic}/{partition}"
    if not first <= end <= own_end:
        raise UserError(f"the source ends at {end} of {where}, and here are offsets {first} to {own_end - 1}")
    compared = await compare(there, here, place, is_compacted=True, last=COMPARED_OFFSETS)
    if not compared.is_copy:
        raise UserError(f"the source has other records at {where}, at {', '.join(map(str, compared.shown))}")
    count, at = 0, end
    async for header, batch in batches_of(here, place, end, own_end):
        _check_repeatable(where, header, at)
        built = producer.create_batch()
        for r in decode_batch(batch):
            built.append(key=r.key, value=r.value, timestamp=r.timestamp_ms, headers=list(r.headers))
        try:
            sent = await (await producer.send_batch(built, topic, partition=partition))
        except KafkaError as e:
            message = f"the source took {where} up to offset {at - 1}, and refuses what follows: {e!r}"
            raise UserError(message) from e
        if sent.offset != at:
            raise UserError(f"the source put offset {at} of {where} at {sent.offset}: it has another producer")
        count, at = count + header.count, header.end
    if at != own_end:
        raise _unrepeatable(where, at)
    return count


def _check_repeatable(where: str, header: BatchHeader, at: int) -> None:
    is_whole = header.base_offset == at and header.count == header.last_offset_delta + 1
    if not is_whole or header.is_control or header.is_transactional:
        raise _unrepeatable(where, at)


def _unrepeatable(where: str, offset: int) -> UserError:
    return UserError(
        f"{where} has a transaction or a gap at offset {offset}, where no producer can write: what is before it is at"
        " the source, and the rest is kept here"
    )


async def give_commits_back(settings: MirrorSettings, there: KafkaSide, admin: Admin, topics: set[str]) -> int:
    """The commits of groups that are further here. A group must have no members at the source."""
    count = 0
    for group in await admin.list_groups():
        name = group.name.removeprefix(KAFKA_GROUP_PREFIX)
        if name == group.name or not settings.wants_group(name):
            continue
        known = await there.commits(name)
        wanted = {
            TopicPartition(*place): OffsetAndMetadata(found.offset, found.metadata)
            for place, found in (await admin.fetch_offsets(group.name)).items()
            if place[0] in topics and found.offset > known.get(place, (-1, ""))[0]
        }
        if wanted:
            options = client_options(settings.source)
            async with AIOKafkaConsumer(group_id=name, enable_auto_commit=False, **options) as consumer:
                consumer.assign(list(wanted))
                await consumer.commit(wanted)
            count += len(wanted)
    return count


async def end_transactions(here: KafkaSide, target: Target, place: Place, lso: int, end: int) -> int:
    """Aborts the transactions of a copy whose source is gone: from `lso` on, those that nothing ends. How many."""
    epochs: dict[int, int] = {}
    async for header, _ in batches_of(here, place, lso, end):
        if header.is_control:
            epochs.pop(header.producer_id, None)
        elif header.is_transactional:
            epochs[header.producer_id] = header.producer_epoch
    markers: list[bytes] = []
    for producer_id, epoch in epochs.items():
        marker = marker_batch(producer_id=producer_id, producer_epoch=epoch, is_commit=False, timestamp_ms=-1)
        markers.append(patched_prefix(end + len(markers), parse_header(marker), 0) + marker[PREFIX_BYTES:])
    await target.append(*place, markers)
    return len(markers)
