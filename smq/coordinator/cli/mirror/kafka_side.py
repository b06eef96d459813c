"""A cluster as seen by Kafka's protocol: its topics, its logs as raw batches, its settings and group commits.

Owns every read by aiokafka's client, which passes a partition's bytes on unread. It must never write: `returning` does.
All of `smq mirror` imports it.
"""

import asyncio
import ssl
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.structs import TopicPartition

from smq.clients.login import read_password
from smq.coordinator.cli.mirror.settings import KafkaSettings
from smq.coordinator.user_errors import ConfigError, NoAnswer
from smq.records import HEADER_BYTES, LENGTH_OVERHEAD

FETCH_BYTES: Final = 8 << 20  # of one answer
PARTITION_BYTES: Final = 1 << 20
OUT_OF_RANGE: Final = 1
EARLIEST: Final = -2
LATEST: Final = -1
_UNCOMMITTED: Final = 0
_START: Final = struct.Struct(">qi")

Place: TypeAlias = tuple[str, int]  # topic and partition


class Piece(NamedTuple):
    """What a fetch has brought of one partition. `error` is Kafka's number."""

    topic: str
    partition: int
    error: int
    hwm: int
    lso: int
    batches: list[bytes]


class KafkaSide:
    """`async with KafkaSide(settings)`."""

    def __init__(self, settings: KafkaSettings, name: str) -> None:
        """`name`: of the side, for errors."""
        self.name = name
        self._settings = settings
        options = client_options(settings)
        self._client = AIOKafkaClient(client_id="smq-mirror", **options)
        self._admin = AIOKafkaAdminClient(client_id="smq-mirror", **options)

    async def __aenter__(self) -> "KafkaSide":
        try:
            await self._client.bootstrap()
            await self._admin.start()
        except (KafkaError, OSError, TimeoutError) as e:
            await self.close()
            raise NoAnswer(f"the {self.name} at {self._settings.bootstrap} does not answer: {e!r}") from e
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()
        await self._admin.close()

    # -- topics
    async def partitions(self) -> dict[str, int]:
        """How many partitions each topic has, without those of Kafka itself."""
        found = await self._client.fetch_all_metadata()
        counts = {
            name: len(found.partitions_for_topic(name) or ()) for name in found.topics(exclude_internal_topics=True)
        }
        return {name: count for name, count in counts.items() if count}

    async def refresh(self) -> None:
        """Learns the leaders of all topics. No topic is ever named in such a request: a broker may make it again."""
        await self._client.force_metadata_update()

    def leader(self, place: Place) -> int | None:
        node = self._client.cluster.leader_for_partition(TopicPartition(*place))
        return node if node is not None and node >= 0 else None

    async def configs(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """The effective settings of each topic."""
        wanted = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
        found: dict[str, dict[str, str]] = {}
        for response in await self._admin.describe_configs(wanted) if wanted else ():
            for code, _, _, name, entries in response.resources:
                _check(code)
                found[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        return found

    # -- logs
    async def fetch(
        self, node: int, offsets: Iterable[tuple[Place, int]], wait_ms: int, bytes_max: int = FETCH_BYTES
    ) -> list[Piece]:
        """Raw batches from each place's offset on, of partitions that the node leads. The first may begin below it."""
        topics: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in offsets:
            topics.setdefault(topic, []).append((partition, offset, min(PARTITION_BYTES, bytes_max)))
        request = FetchRequest(wait_ms, 1, bytes_max, _UNCOMMITTED, list(topics.items()))
        response = await self._client.send(node, request)
        return [
            Piece(topic, part[0], part[1], part[2], part[3], list(whole_batches(part[-1] or b"")))
            for topic, parts in response.topics
            for part in parts
        ]

    async def fetch_one(self, place: Place, offset: int) -> Piece:
        """As `fetch`, of one partition, as soon as its leader is known."""
        while True:
            node = self.leader(place)
            if node is not None:
                (piece,) = await self.fetch(node, [(place, offset)], 100)
                if piece.error in (0, OUT_OF_RANGE):
                    return piece
            await self.refresh()
            await asyncio.sleep(0.1)

    async def bounds(self, place: Place) -> tuple[int, int]:
        """The first offset and the end, uncommitted records included."""
        first, end = await self._offset(place, EARLIEST), await self._offset(place, LATEST)
        return first, end

    async def _offset(self, place: Place, kind: int) -> int:
        topic, partition = place
        while True:
            node = self.leader(place)
            if node is not None:
                request = OffsetRequest(-1, _UNCOMMITTED, [(topic, [(partition, kind)])])
                response = await self._client.send(node, request)
                found = response.topics[0][1][0]
                if not found[1]:
                    offset: int = found[3]
                    return offset
            await self.refresh()
            await asyncio.sleep(0.1)

    # -- groups
    async def groups(self) -> list[str]:
        return sorted({group for group, _ in await self._admin.list_consumer_groups()})

    async def commits(self, group: str) -> dict[Place, tuple[int, str]]:
        """The group's next offset and its metadata by partition."""
        found = await self._admin.list_consumer_group_offsets(group)
        return {
            (at.topic, at.partition): (made.offset, made.metadata or "")
            for at, made in found.items()
            if made.offset >= 0
        }


def whole_batches(data: bytes) -> Iterator[bytes]:
    """The batches of an answer, whose last one may be cut."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        size = _START.unpack_from(data, at)[1] + LENGTH_OVERHEAD
        if size < HEADER_BYTES or at + size > len(data):
            return
        yield data[at : at + size]
        at += size


def _check(code: int) -> None:
    if code:
        raise for_code(code)()


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """ConfigError, and INVALID_REQUEST for a file of a password that is unusable, or that others may read."""
    protocol = settings.security_protocol
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise ConfigError(f"security_protocol is PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, not {protocol!r}")
    options: dict[str, Any] = {"bootstrap_servers": settings.bootstrap, "security_protocol": protocol}
    if protocol.endswith("SSL"):
        options["ssl_context"] = ssl.create_default_context(cafile=settings.ca_file or None)
    if protocol.startswith("SASL"):
        if not settings.username or not settings.password_file:
            raise ConfigError(f"{protocol} needs username and password_file")
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.username
        options["sasl_plain_password"] = read_password(Path(settings.password_file))
    return options
