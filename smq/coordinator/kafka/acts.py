"""Which requests are administrative acts, what each is about, and its outcome, for the audit log.

Owns the names that a request is known by there. It must never name a value that may be secret: of credentials only the
user. `connection` imports it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.authorization import CODES
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.audit import setting

_LABELS: Final = ("name", "topic", "resource_name", "group_id", "user", "feature", "partition_index", "partition_id")
_REFUSED: Final = frozenset(CODES.values())


def _each(field: str, *names: str) -> Callable[[Struct], list[str]]:
    """Of a list in the request, what these fields of each item say; without fields the items are names."""

    def on(request: Struct) -> list[str]:
        items = request.get(field) or []
        return [" ".join(str(item[n]) for n in names if item.get(n) is not None) if names else item for item in items]

    return on


def _deleted(request: Struct) -> list[str]:
    topics = request.get("topics") or []
    return [*(request.get("topic_names") or []), *(topic["name"] or topic["topic_id"].hex() for topic in topics)]


def _configured(request: Struct) -> list[str]:
    return [
        f"{resource['resource_type']} {resource['resource_name']} {setting(config['name'], config['value'])}"
        for resource in request["resources"]
        for config in resource["configs"]
    ]


def _credentials(request: Struct) -> list[str]:
    return [f"{change} {row['name']}" for change in ("deletions", "upsertions") for row in request[change]]


def _quotas(request: Struct) -> list[str]:
    out = []
    for entry in request["entries"]:
        whose = " ".join(f"{part['entity_type']} {part['entity_name'] or '*'}" for part in entry["entity"])
        out += [f"{whose} {op['key']}={'' if op['remove'] else op['value']}" for op in entry["ops"]]
    return out


_RULE: Final = ("resource_type", "resource_pattern_type", "resource_name", "principal", "host", "operation")
_FILTER: Final = ("resource_type_filter", "resource_name_filter", "principal_filter", "host_filter", "operation")
ACTS: Final[Mapping[int, Callable[[Struct], list[str]]]] = {
    ApiKey.CREATE_TOPICS: _each("topics", "name"),
    ApiKey.DELETE_TOPICS: _deleted,
    ApiKey.DELETE_RECORDS: _each("topics", "name"),
    ApiKey.CREATE_PARTITIONS: _each("topics", "name", "count"),
    ApiKey.CREATE_ACLS: _each("creations", *_RULE, "permission_type"),
    ApiKey.DELETE_ACLS: _each("filters", *_FILTER, "permission_type"),
    ApiKey.ALTER_CONFIGS: _configured,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _configured,
    ApiKey.DELETE_GROUPS: _each("groups_names"),
    ApiKey.OFFSET_DELETE: lambda request: [request["group_id"]],
    ApiKey.ELECT_LEADERS: _each("topic_partitions", "topic"),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _credentials,
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.UPDATE_FEATURES: _each("feature_updates", "feature", "max_version_level"),
}


def outcome(answer: Struct) -> tuple[dict[str, str], bool, bool]:
    """What an answer says was not done, by name, whether a right was lacking, and whether a part was done."""
    found = list(_errors(answer, ""))
    errors = {name: code for name, code in found if code}
    refused = not _REFUSED.isdisjoint(errors.values())
    return {name: code.name for name, code in errors.items()}, refused, any(name and not code for name, code in found)


def _errors(value: Any, label: str) -> Iterator[tuple[str, KafkaError]]:
    if isinstance(value, list):
        for item in value:
            yield from _errors(item, label)
    elif isinstance(value, dict):
        own = next((str(value[name]) for name in _LABELS if value.get(name) not in (None, "")), "")
        label = f"{label} {own}".strip()
        for name, item in value.items():
            if name.endswith("error_code") and name != "topic_config_error_code":
                yield label, KafkaError(item)
            elif isinstance(item, list):
                yield from _errors(item, label)
