"""Text and JSON as bytes and back, and a place for other formats.

Owns two ready pairs of functions and the shape of one's own. Clients take and give bytes alone, so that a record is the
same for every reader, and types stay exact. Users import it through `smq.clients`.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from smq.clients.arguments import invalid, shown

V = TypeVar("V")


@dataclass(frozen=True)
class Serde(Generic[V]):
    """A format: `Serde(to_bytes, from_bytes)` makes one's own. None stays None, as a record's key or value may be."""

    to_bytes: Callable[[V], bytes]
    from_bytes: Callable[[bytes], V]

    def encode(self, value: V | None) -> bytes | None:
        """For `send`. INVALID_REQUEST if the format cannot hold the value."""
        if value is None:
            return None
        try:
            return self.to_bytes(value)
        except (TypeError, ValueError, AttributeError) as e:
            raise invalid(f"{shown(value)} cannot be encoded: {e}") from e

    def encode_all(self, values: Iterable[V | None]) -> list[bytes | None]:
        """For `send_many`."""
        return [self.encode(value) for value in values]

    def decode(self, data: bytes | None) -> V | None:
        """Of a record's key or value. INVALID_REQUEST if the bytes are not of this format."""
        if data is None:
            return None
        try:
            return self.from_bytes(data)
        except (TypeError, ValueError) as e:
            raise invalid(f"{shown(data)} cannot be decoded: {e}") from e


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


STRING: Final[Serde[str]] = Serde(str.encode, bytes.decode)  # UTF-8
JSON: Final[Serde[Any]] = Serde(_json_bytes, json.loads)  # compact; NaN and infinities are refused
