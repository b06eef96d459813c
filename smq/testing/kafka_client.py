"""One blocking connection to one node's Kafka port: requests as dicts, or as any bytes at all.

Owns the framing and the filling in of defaults; the codec is the server's own. Tests use it for requests that no Kafka
client would send.
"""

import ast
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from smq.coordinator.kafka.api_keys import ApiKey, is_header_flexible, request_message, response_message
from smq.coordinator.kafka.codec import Field, Struct, compile_decoder, compile_encoder, default_source
from smq.records import NewRecord, encode_batch

TIMEOUT_S = 15.0


class RawKafka:
    """A connection. `call` sends one request and reads its answer."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._correlation = 0

    def close(self) -> None:
        self.socket.close()

    def send(self, key: ApiKey, version: int, /, *, times: int = 1, **fields: Any) -> int:
        """Sends the request this many times, in one write. Returns the correlation id of the last."""
        message = request_message(key)
        body = b"".join(compile_encoder(message, version)(_filled(fields, message.fields, version)))
        tags = b"\0" if is_header_flexible(key, version) else b""
        frames = []
        for _ in range(times):
            self._correlation += 1
            frames.append(struct.pack(">hhih", key, version, self._correlation, -1) + tags + body)
        self.send_frame(*frames)
        return self._correlation

    def send_frame(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(struct.pack(">i", len(frame)) + frame for frame in frames))

    def receive(self, key: ApiKey, version: int) -> tuple[int, Struct]:
        """The correlation id and body of the next answer."""
        data = self.receive_frame()
        start = 5 if key != ApiKey.API_VERSIONS and is_header_flexible(key, version) else 4
        body = compile_decoder(response_message(key), version)(memoryview(data), start)
        return struct.unpack_from(">i", data)[0], body

    def receive_frame(self) -> bytes:
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the node closed the connection")
            data += piece
        return data

    def is_closed_by_node(self) -> bool:
        """Waits for the end of the connection; False if an answer comes instead."""
        try:
            return not self.socket.recv(1)
        except ConnectionResetError:
            return True

    def call(self, key: ApiKey, version: int, /, **fields: Any) -> Struct:
        sent = self.send(key, version, **fields)
        got, body = self.receive(key, version)
        assert got == sent
        return body

    # ------------------------------------------------------------------------------------------ common calls
    def produce(
        self,
        topic: str,
        records: bytes | None,
        *,
        version: int = 9,
        acks: int = -1,
        topic_id: bytes = bytes(16),
        **fields: Any,
    ) -> Struct:
        """Produces to partition 0; the answer for that partition."""
        parts = None if records is None else [records]
        data = [{"name": topic, "topic_id": topic_id, "partition_data": [{"index": 0, "records": parts}]}]
        body = self.call(ApiKey.PRODUCE, version, acks=acks, timeout_ms=10_000, topic_data=data, **fields)
        answer: Struct = body["responses"][0]["partition_responses"][0]
        return answer

    def fetch(
        self, topic: str, offset: int, *, version: int = 12, max_wait_ms: int = 0, rack: str = "", **fields: Any
    ) -> Struct:
        """Fetches from partition 0; the answer for that partition. `fields` are those of the partition."""
        requested = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20} | fields
        body = self.call(
            ApiKey.FETCH,
            version,
            replica_id=-1,
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=1 << 20,
            topics=[{"topic": topic, "partitions": [requested]}],
            forgotten_topics_data=[],
            rack_id=rack,
        )
        answer: Struct = body["responses"][0]["partitions"][0]
        return answer

    def list_offset(self, topic: str, timestamp: int, *, version: int = 7, isolation_level: int = 0) -> Struct:
        """Looks up an offset of partition 0; the answer for that partition."""
        requested = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}]
        fields = {"replica_id": -1, "isolation_level": isolation_level, "topics": requested}
        body = self.call(ApiKey.LIST_OFFSETS, version, **fields)
        answer: Struct = body["topics"][0]["partitions"][0]
        return answer

    def create_topic(
        self,
        name: str,
        *,
        version: int = 7,
        is_dry: bool = False,
        assignments: Mapping[int, Sequence[int]] | None = None,
        configs: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Struct:
        """The answer for that topic. Numbers that `fields` do not name are the cluster's to choose."""
        requested = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [{"partition_index": i, "broker_ids": nodes} for i, nodes in (assignments or {}).items()],
            "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
            **fields,
        }
        body = self.call(ApiKey.CREATE_TOPICS, version, topics=[requested], timeout_ms=20_000, validate_only=is_dry)
        answer: Struct = body["topics"][0]
        return answer

    def commit(
        self, group: str, topic: str, offset: int, *, version: int = 8, topic_id: bytes = bytes(16), **fields: Any
    ) -> Struct:
        """Commits for partition 0, of no member; the answer for that partition. `fields` are those of the partition."""
        partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""} | fields
        topics = [{"name": topic, "topic_id": topic_id, "partitions": [partition]}]
        body = self.call(ApiKey.OFFSET_COMMIT, version, group_id=group, topics=topics)
        answer: Struct = body["topics"][0]["partitions"][0]
        return answer


def _filled(value: Struct, fields: tuple[Field, ...], version: int) -> Struct:
    """`value` with the default of every field that it leaves out."""
    out = {}
    for field in fields:
        found = value.get(field.name)
        if field.name not in value:
            out[field.name] = ast.literal_eval(default_source(field, version))
        elif not field.type and isinstance(found, list):
            out[field.name] = [_filled(v, field.fields, version) for v in found]
        else:
            out[field.name] = found
    return out


def batch(*values: bytes, first_ms: int = 1_000, **producer: Any) -> bytes:
    """An encoded batch of these values, with create times a second apart."""
    records = [NewRecord(key=b"k", value=v, timestamp_ms=first_ms + 1_000 * i) for i, v in enumerate(values)]
    return encode_batch(records, **producer)
