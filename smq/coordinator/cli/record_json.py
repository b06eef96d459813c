"""A record as one line of JSON, as `smq consume --json` and `smq topic export --format jsonl` write it.

Owns the rule for bytes: UTF-8 is written as text under its own name, anything else as base64 under `<name>_base64`. So
each line says which it is, and `smq produce --format records` reads it back. Integers are written in full: a reader
that keeps numbers as doubles cannot hold ts_ns exactly.
"""

import base64
import json

from smq.clients import ConsumerRecord


def record_line(record: ConsumerRecord, *, offset_name: str) -> bytes:
    """The line without its line end. `offset_name` is the name of the offset's field."""
    fields: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        offset_name: record.offset,
        "ts_ns": record.ts_ns,
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }
    if record.headers:
        fields["headers"] = [{"key": key, **_text("value", value)} for key, value in record.headers]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _text(name: str, given: bytes | None) -> dict[str, str | None]:
    if given is None:
        return {name: None}
    try:
        return {name: given.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(given).decode()}
