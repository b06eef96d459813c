"""A record as one line of JSON, as `smq consume --json` and `smq topic export --format jsonl` write it.

Owns the rule for bytes: what is UTF-8 goes as text under its own name, anything else as base64 under
`<name>_base64`, so that a line says for itself which it is, and `smq produce --format records` reads it back.
Integers are written in full: ts_ns is beyond what a reader that keeps numbers as doubles can hold exactly.
"""

import base64
import json

from smq.clients import ConsumerRecord


def record_line(record: ConsumerRecord, *, offset_name: str) -> bytes:
    """The line without its end. `offset_name` is what the offset is called."""
    told: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        offset_name: record.offset,
        "ts_ns": record.ts_ns,
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }
    if record.headers:
        told["headers"] = [{"key": key, **_text("value", value)} for key, value in record.headers]
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def _text(name: str, given: bytes | None) -> dict[str, str | None]:
    if given is None:
        return {name: None}
    try:
        return {name: given.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(given).decode()}
