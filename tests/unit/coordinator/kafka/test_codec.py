"""The compiled Kafka codec against kio, an independent implementation, and against bytes that are no message."""

import ast
import importlib
import random
import re
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader

from smq.coordinator.kafka.api_keys import SERVED, ApiKey, request_decoder, request_message, response_message
from smq.coordinator.kafka.codec import (
    ELEMENTS_MAX,
    CodecError,
    Field,
    Message,
    Struct,
    compact_string,
    compile_decoder,
    compile_encoder,
    default_source,
    uvarint,
)
from smq.coordinator.kafka.connection import parse_request
from smq.coordinator.kafka.handlers import HANDLERS, LONG_POLLS

MESSAGES_A_VERSION = 12
UNKNOWN_TO_KIO = {(ApiKey.OFFSET_COMMIT, 1)}  # `test_offset_commit_of_version_1` has its bytes
CASES = [
    (message, version)
    for key, row in SERVED.items()
    for message in (request_message(key), response_message(key))
    for version in range(row.versions.lo, row.versions.hi + 1)
    if (key, version) not in UNKNOWN_TO_KIO
]
IDS = [f"{message.name}-v{version}" for message, version in CASES]
_ERROR_CODES = [code.value for code in ErrorCode]


def test_every_served_key_has_a_handler() -> None:
    assert set(HANDLERS) | set(LONG_POLLS) | {ApiKey.PRODUCE} == set(SERVED)


def test_no_message_is_compiled_before_it_is_used() -> None:
    program = (
        "from smq.coordinator.kafka import handlers, api_keys;"
        "print(api_keys.request_decoder.cache_info().currsize, api_keys.response_encoder.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


@pytest.mark.parametrize("key", SERVED)
def test_served_versions_are_within_the_definitions(key: int) -> None:
    for message in (request_message(key), response_message(key)):
        assert message.api_key == key
        assert message.versions.lo <= SERVED[key].versions.lo <= SERVED[key].versions.hi <= message.versions.hi


def test_offset_commit_of_version_1() -> None:
    """As kaf sends it: with a time per partition, which is ignored, and without a leader epoch."""
    text = b"\0\x01g" + struct.pack(">i", -1) + b"\0\0" + struct.pack(">i", 1) + b"\0\x01t" + struct.pack(">i", 1)
    data = text + struct.pack(">iqqh", 3, 42, -1, -1)
    request = request_decoder(ApiKey.OFFSET_COMMIT, 1)(memoryview(data), 0)
    assert (request["group_id"], request["generation_id_or_member_epoch"], request["member_id"]) == ("g", -1, "")
    (topic,) = request["topics"]
    (partition,) = topic["partitions"]
    assert (topic["name"], partition["partition_index"], partition["committed_offset"]) == ("t", 3, 42)
    assert (partition["committed_leader_epoch"], partition["committed_metadata"]) == (-1, None)
    partitions = [{"partition_index": 3, "error_code": 0}]
    answer = compile_encoder(response_message(ApiKey.OFFSET_COMMIT), 1)(
        {"throttle_time_ms": 0, "topics": [{"name": "t", "topic_id": bytes(16), "partitions": partitions}]}
    )
    assert b"".join(answer) == struct.pack(">i", 1) + b"\0\x01t" + struct.pack(">iih", 1, 3, 0)


# ------------------------------------------------------------------------------------------------ against kio
@pytest.mark.parametrize(("message", "version"), CASES, ids=IDS)
def test_random_messages_mean_the_same_to_kio(message: Message, version: int) -> None:
    rng = random.Random(f"{message.name} {version}")
    read = entity_reader(_kio_type(message, version))
    encode, decode = compile_encoder(message, version), compile_decoder(message, version)
    for _ in range(MESSAGES_A_VERSION):
        value = random_struct(rng, message.fields, version)
        data = b"".join(encode(value))
        entity, size = read(data, 0)
        assert size == len(data)
        _assert_same(value, entity, message.fields, version)
        assert _plain(decode(memoryview(data), 0)) == _plain(_completed(value, message.fields, version))


def _kio_type(message: Message, version: int) -> Any:
    name, kind = re.fullmatch(r"(\w+)(Request|Response)", message.name).groups()  # type: ignore[union-attr] # all match
    package = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    module = importlib.import_module(f"kio.schema.{package}.v{version}.{kind.lower()}")
    return getattr(module, message.name)


def random_struct(rng: random.Random, fields: tuple[Field, ...], version: int) -> Struct:
    out = {}
    for field in fields:
        if version not in field.versions or (version in field.tagged and rng.random() < 0.5):
            continue
        out[field.name] = _random_value(rng, field, version)
    return out


def _random_value(rng: random.Random, field: Field, version: int) -> Any:
    if version in field.nullable and rng.random() < 0.2:
        return None
    if field.is_array:
        return [_random_one(rng, field, version) for _ in range(rng.choice((0, 1, 2, 3 if not field.type else 130)))]
    return _random_one(rng, field, version)


def _random_one(rng: random.Random, field: Field, version: int) -> Any:
    match field.type:
        case "":
            return random_struct(rng, field.fields, version)
        case "bool":
            return rng.random() < 0.5
        case "string":
            return "".join(rng.choices("abcüß-漢", k=rng.choice((0, 1, 9, 60, 200))))
        case "records":
            return [rng.randbytes(rng.choice((0, 1, 300))) for _ in range(3)]
        case "bytes":
            return rng.randbytes(rng.choice((0, 1, 300)))
        case "uuid":
            return rng.randbytes(16)
        case "int16" if "error_code" in field.name:
            return rng.choice(_ERROR_CODES)
        case "int8":
            return rng.randrange(128)
        case "int16" | "uint16":
            return rng.randrange(2**15)
        case _:  # durations of kio's are never negative, and not longer than its timedelta
            return rng.choice((0, 1, 2**31 - 1, rng.randrange(2**31)))


def _assert_same(value: Struct, entity: Any, fields: tuple[Field, ...], version: int) -> None:
    """Under the same names, where kio has plain types; structs and arrays by their parts."""
    for field in fields:
        if field.name not in value:
            continue
        name = field.name if hasattr(entity, field.name) else field.name.removesuffix("_ms")  # durations
        ours, theirs = value[field.name], getattr(entity, name)
        if field.is_array and ours is not None:
            assert len(ours) == len(theirs)
            if not field.type:
                for a, b in zip(ours, theirs, strict=True):
                    _assert_same(a, b, field.fields, version)
        elif not field.type and ours is not None:
            _assert_same(ours, theirs, field.fields, version)
        elif field.type == "records":
            assert (None if ours is None else b"".join(ours)) == (None if theirs is None else bytes(theirs))
        elif field.type in ("string", "bool", "bytes") or (isinstance(theirs, int) and field.type.startswith("int")):
            assert ours == theirs


def _completed(value: Struct | None, fields: tuple[Field, ...], version: int) -> Any:
    """With what is missing in its place, as the decoder gives it: known from the decoder of an empty struct."""
    if value is None:
        return None
    out = {}
    for field in fields:
        if field.name not in value:
            out[field.name] = ast.literal_eval(default_source(field, version))
        elif not field.type and field.is_array and value[field.name] is not None:
            out[field.name] = [_completed(v, field.fields, version) for v in value[field.name]]
        elif not field.type and not field.is_array:
            out[field.name] = _completed(value[field.name], field.fields, version)
        else:
            out[field.name] = value[field.name]
    return out


def _plain(value: Any) -> Any:
    """Records and bytes as bytes."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list) and value and all(isinstance(v, bytes) and len(v) != 16 for v in value):
        return b"".join(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return bytes(value) if isinstance(value, memoryview) else value


# ------------------------------------------------------------------------------------------ bytes of strangers
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(range(len(CASES))), st.binary(max_size=200))
def test_garbage_is_a_codec_error_or_a_message(case: int, data: bytes) -> None:
    message, version = CASES[case]
    try:
        compile_decoder(message, version)(memoryview(data), 0)
    except CodecError:
        pass


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(range(len(CASES))), st.integers(0, 2**32), st.data())
def test_a_damaged_message_is_a_codec_error_or_a_message(case: int, seed: int, data: st.DataObject) -> None:
    message, version = CASES[case]
    value = random_struct(random.Random(seed), message.fields, version)
    whole = bytearray(b"".join(compile_encoder(message, version)(value)))
    if whole:
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        compile_decoder(message, version)(memoryview(cut), 0)
    except CodecError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(SERVED)), st.integers(-1, 20), st.binary(max_size=100))
def test_a_garbled_request_is_a_codec_error_or_a_request(key: int, version: int, data: bytes) -> None:
    frame = key.to_bytes(2, "big") + version.to_bytes(2, "big", signed=True) + b"\0\0\0\1" + data
    try:
        parse_request(memoryview(frame))
    except CodecError:
        pass


@pytest.mark.parametrize("key", SERVED)
def test_every_cut_of_a_request_is_refused(key: int) -> None:
    for version in range(SERVED[key].versions.lo, SERVED[key].versions.hi + 1):
        message = request_message(key)
        value = random_struct(random.Random(version), message.fields, version)
        whole = b"".join(compile_encoder(message, version)(value))
        for cut in range(0, len(whole), max(1, len(whole) // 50)):
            with pytest.raises(CodecError):
                request_decoder(key, version)(memoryview(whole)[:cut], 0)
        request_decoder(key, version)(memoryview(whole + b"\0"), 0)  # as librdkafka may send it


def test_more_elements_than_a_message_may_have_are_refused_before_they_are_made() -> None:
    count = ELEMENTS_MAX + 1
    body = compact_string(None) + b"\0\1\0\0\0\1" + uvarint(count + 1)
    with pytest.raises(CodecError, match="elements"):
        request_decoder(ApiKey.PRODUCE, 9)(memoryview(body + bytes(2 * count)), 0)


def test_an_array_longer_than_its_bytes_is_refused() -> None:
    with pytest.raises(CodecError, match="a count of"):
        request_decoder(ApiKey.METADATA, 1)(memoryview(b"\x7f\xff\xff\xff"), 0)


def test_records_are_views_of_the_request() -> None:
    encode = compile_encoder(request_message(ApiKey.PRODUCE), 9)
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": [b"x" * 100]}]}]
    data = b"".join(encode({"acks": 1, "timeout_ms": 1, "topic_data": topics}))
    found = request_decoder(ApiKey.PRODUCE, 9)(memoryview(data), 0)["topic_data"][0]["partition_data"][0]["records"]
    assert isinstance(found, memoryview)
    assert found.obj is data


def test_an_unknown_version_of_api_versions_is_not_an_error() -> None:
    assert parse_request(memoryview(b"\0\x12\0\x63\0\0\0\7" + b"whatever")).body is None
