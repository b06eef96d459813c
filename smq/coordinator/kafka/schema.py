"""Kafka's message definitions as Python objects: which fields each version has, and their types.

Owns the reading of the JSON files under messages/. It knows nothing of bytes: `codec` makes code of the definitions.
"""

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

_COMMENT: Final = re.compile(r"^\s*//.*$", re.MULTILINE)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VERSION_MAX: Final = 2**15 - 1


@dataclass(frozen=True, slots=True)
class Versions:
    """Both ends included; none if `lo` > `hi`."""

    lo: int
    hi: int

    def __contains__(self, version: int) -> bool:
        return self.lo <= version <= self.hi


NONE: Final = Versions(0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """`type` is a primitive's name, or "" for a struct with `fields`. `is_array`: the field is a list of these."""

    name: str  # in snake_case, the key in the decoded dict
    type: str
    is_array: bool
    versions: Versions
    nullable: Versions
    tagged: Versions
    tag: int
    default: str | None
    is_ignorable: bool
    fields: tuple["Field", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    name: str
    api_key: int
    versions: Versions
    flexible: Versions
    fields: tuple[Field, ...]


def load_message(name: str) -> Message:
    """The definition in messages/NAME.json."""
    text = (files("smq.coordinator.kafka") / "messages" / f"{name}.json").read_text()
    raw = json.loads(_COMMENT.sub("", text))
    commons = {common["name"]: common["fields"] for common in raw.get("commonStructs", ())}
    return Message(
        name=name,
        api_key=raw["apiKey"],
        versions=_versions(raw["validVersions"]),
        flexible=_versions(raw["flexibleVersions"]),
        fields=tuple(_field(f, commons) for f in raw["fields"]),
    )


def _versions(text: str) -> Versions:
    if text == "none":
        return NONE
    lo, dash, hi = text.partition("-")
    if lo.endswith("+"):
        return Versions(int(lo[:-1]), _VERSION_MAX)
    return Versions(int(lo), int(hi) if dash else int(lo))


def _field(raw: dict[str, Any], commons: dict[str, list[dict[str, Any]]]) -> Field:
    type_: str = raw["type"]
    is_array = type_.startswith("[]")
    type_ = type_.removeprefix("[]")
    fields = raw.get("fields") or commons.get(type_) or []
    default = raw.get("default")
    return Field(
        name=_HUMP.sub("_", raw["name"]).lower(),
        type="" if fields else type_,
        is_array=is_array,
        versions=_versions(raw.get("versions", "0+")),
        nullable=_versions(raw.get("nullableVersions", "none")),
        tagged=_versions(raw.get("taggedVersions", "none")),
        tag=raw.get("tag", -1),
        default=None if default is None else str(default).lower() if isinstance(default, bool) else str(default),
        is_ignorable=raw.get("ignorable", False),
        fields=tuple(_field(f, commons) for f in fields),
    )
