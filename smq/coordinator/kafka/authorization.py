"""What a user of this port may do: the rights that each request needs, the answer without them, and authorized
operations.

Owns the table from keys to rights, which is Kafka's. A request that names several resources is answered for those that
the user has a right to, and the others get an error that does not say whether they exist; a list of everything leaves
them out. A key without a row is refused. It must never decide: the authorizer does. `connection` asks it before a
handler runs, and completes the handler's answer by it. On a listener that asks for no user, everything is allowed.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from smq.coordinator.kafka.api_keys import ApiKey, response_message
from smq.coordinator.kafka.cluster_view import NO_TOPIC_ID
from smq.coordinator.kafka.codec import Field, Struct, default_source
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.authorizer import Authorizer
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource
from smq.raft_state.ids import TopicId
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_config import is_external

_NOT_ASKED: Final = -(2**31)
_CONFIGS: Final = (Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS)
_OF_TOPIC: Final = (
    Operation.READ,
    Operation.WRITE,
    Operation.CREATE,
    Operation.DELETE,
    Operation.ALTER,
    Operation.DESCRIBE,
    *_CONFIGS,
)
_OF_GROUP: Final = (Operation.READ, Operation.DELETE, Operation.DESCRIBE, *_CONFIGS)
_OF_CLUSTER: Final = (
    Operation.CREATE,
    Operation.ALTER,
    Operation.DESCRIBE,
    Operation.CLUSTER_ACTION,
    Operation.IDEMPOTENT_WRITE,
    *_CONFIGS,
)
CODES: Final = {
    Resource.TOPIC: KafkaError.TOPIC_AUTHORIZATION_FAILED,
    Resource.GROUP: KafkaError.GROUP_AUTHORIZATION_FAILED,
    Resource.CLUSTER: KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    Resource.TRANSACTIONAL_ID: KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_MESSAGE: Final = "the user has no right to this (`smq acl test` says which rule decides)"


def _bits(operations: Iterable[Operation]) -> int:
    """Kafka's bit field: an operation's number is the position of its bit."""
    return sum(1 << operation for operation in operations)


def on_topic(*, is_asked: bool) -> int:
    return _bits(_OF_TOPIC) if is_asked else _NOT_ASKED


def on_group(*, is_asked: bool) -> int:
    return _bits(_OF_GROUP) if is_asked else _NOT_ASKED


def on_cluster(*, is_asked: bool) -> int:
    return _bits(_OF_CLUSTER) if is_asked else _NOT_ASKED


class Access:
    """The rights of one connection's user, and the names of the topics that a request gives by their ids."""

    def __init__(self, authorizer: Authorizer, user: str, host: str, state: Callable[[], ClusterState]) -> None:
        self._authorizer = authorizer
        self.user = user
        self._host = host
        self._state = state

    def may(self, operation: Operation, resource: Resource, name: str) -> bool:
        return self._authorizer.may(self.user, self._host, operation, resource, name)

    def may_cluster(self, operation: Operation) -> bool:
        return self.may(operation, Resource.CLUSTER, CLUSTER_NAME)

    def may_any(self, operation: Operation, resource: Resource) -> bool:
        return self._authorizer.may_any(self.user, self._host, operation, resource)

    def fault(self, operation: Operation, topic: Struct) -> KafkaError:
        """Of a topic by its name, its id, or both. An unknown id is none of the user's: by the time that a handler
        looks it up, it may be that of a topic."""
        names, topic_id = [name for key in ("name", "topic") if (name := topic.get(key))], topic.get("topic_id")
        if topic_id is not None and topic_id != NO_TOPIC_ID:
            found = self._state().topic_names.get(TopicId(topic_id))
            if found is None:
                return KafkaError.UNKNOWN_TOPIC_ID
            names.append(found)
        is_allowed = all(self.may(operation, Resource.TOPIC, name) for name in names)
        return KafkaError.NONE if is_allowed else KafkaError.TOPIC_AUTHORIZATION_FAILED

    def sees(self, topic: Struct) -> bool:
        return self.fault(Operation.DESCRIBE, topic) is not KafkaError.TOPIC_AUTHORIZATION_FAILED

    def seen_topics(self) -> list[str]:
        """Of those that a list of all has."""
        topics = self._state().topics.values()
        names = (topic.name for topic in topics if not is_external(topic.config))
        return [name for name in names if self.may(Operation.DESCRIBE, Resource.TOPIC, name)]

    @property
    def rules(self) -> object:
        """Another object after each change of any rule."""
        return self._authorizer.rules

    @property
    def is_super(self) -> bool:
        return self._authorizer.is_super(self.user)

    def bits(self, value: int, operations: Iterable[Operation], resource: Resource, name: str) -> int:
        """The bit field of what the user may do, in place of one of everything."""
        if value == _NOT_ASKED:
            return value
        return _bits(operation for operation in operations if self.may(operation, resource, name))


class Refusal(Exception):
    """Nothing of the request may be done; `answer` says so."""

    def __init__(self, answer: Struct) -> None:
        super().__init__("refused")
        self.answer = answer


class Refused(dict[str, Any]):
    """A row of an answer, for what was refused."""


Complete: TypeAlias = Callable[[Struct], Struct]  # what the handler has answered -> what the client gets
# Raises Refusal, or takes out of the request what may not be done; then its result completes the handler's answer.
Rule: TypeAlias = Callable[[Access, int, Struct], Complete | None]
Row: TypeAlias = Callable[[Any, KafkaError], Refused]  # of the answer, for a part of the request that is refused


def check(access: Access, key: int, version: int, request: Struct) -> Complete | None:
    """Refusal if nothing of the request may be done. Changes `request` to what may be. KeyError for a key that no row
    has."""
    if access.is_super:
        return None
    try:
        complete = RULES[key](access, version, request)
    except Refusal as e:
        raise Refusal(_filled(e.answer, _template(key, version))) from None
    if complete is None:
        return None
    finish, template = complete, _template(key, version)

    def with_rows(answer: Struct) -> Struct:
        """The rows of what was refused have all fields, as those of a handler."""
        out = finish(answer)
        for name, inner in template.inner.items():
            if any(type(row) is Refused for row in out.get(name) or ()):
                out[name] = [_filled(row, inner) if type(row) is Refused else row for row in out[name]]
        return out

    return with_rows


@dataclass(frozen=True, slots=True)
class _Template:
    """What a message's fields are if nothing is said of them, and the same of what its lists hold."""

    defaults: Struct
    inner: dict[str, "_Template"]


@cache
def _template(key: int, version: int) -> _Template:
    return _template_of(response_message(key).fields, version)


def _template_of(fields: tuple[Field, ...], version: int) -> _Template:
    defaults = {field.name: ast.literal_eval(default_source(field, version)) for field in fields}
    inner = {field.name: _template_of(field.fields, version) for field in fields if field.is_array and field.fields}
    return _Template(defaults, inner)


def _filled(value: Struct, template: _Template) -> Struct:
    out = template.defaults | value
    for name, inner in template.inner.items():
        if out[name]:
            out[name] = [_filled(row, inner) for row in out[name]]
    return out


# ------------------------------------------------------------------------------------------------------ the rules
def _free(_access: Access, _version: int, _request: Struct) -> None:
    """For every user."""


def _in_order(*rules: Rule) -> Rule:
    def rule(access: Access, version: int, request: Struct) -> Complete | None:
        completes = [found for each in rules if (found := each(access, version, request)) is not None]

        def complete(answer: Struct) -> Struct:
            for each in completes:
                answer = each(answer)
            return answer

        return complete if completes else None

    return rule


def _whole(
    operation: Operation,
    resource: Resource,
    name: Callable[[Struct], str | None],
    answer: Callable[[Struct, KafkaError], Struct] | None = None,
) -> Rule:
    """The right to one thing, without which nothing is done. No name: no right is needed."""

    def rule(access: Access, _version: int, request: Struct) -> None:
        named, code = name(request), CODES[resource]
        if named is None or access.may(operation, resource, named):
            return
        refused = {"error_code": code, "error_message": _MESSAGE}
        raise Refusal(answer(request, code) if answer is not None else refused)

    return rule


def _cluster(operation: Operation, answer: Callable[[Struct, KafkaError], Struct] | None = None) -> Rule:
    return _whole(operation, Resource.CLUSTER, lambda _: CLUSTER_NAME, answer)


def _listed(asked: str, answered: str, row: Row, fault: Callable[[Access, Any], KafkaError]) -> Rule:
    """The right to each of a list. The others get `row` in the answer, and the handler does not see them."""

    def rule(access: Access, _version: int, request: Struct) -> Complete | None:
        named = [(item, fault(access, item)) for item in request[asked] or []]
        rows = [row(item, code) for item, code in named if code is not KafkaError.NONE]
        if not rows:
            return None
        request[asked] = [item for item, code in named if code is KafkaError.NONE]
        if not request[asked]:  # to a handler an empty list may mean everything
            raise Refusal({answered: rows})

        def complete(answer: Struct) -> Struct:
            return answer | {answered: [*answer[answered], *rows]}

        return complete

    return rule


def _topics(operation: Operation, row: Row, asked: str = "topics", answered: str = "topics") -> Rule:
    return _listed(asked, answered, row, lambda access, topic: access.fault(operation, topic))


def _names(operation: Operation, resource: Resource, asked: str, answered: str, row: Row) -> Rule:
    """Of a list of plain names."""

    def fault(access: Access, name: str) -> KafkaError:
        return KafkaError.NONE if access.may(operation, resource, name) else CODES[resource]

    return _listed(asked, answered, row, fault)


def _seen(kept: str, may: Callable[[Access, Struct], bool]) -> Rule:
    """A list in the answer leaves out what the user may not see."""

    def rule(access: Access, _version: int, _request: Struct) -> Complete:
        def complete(answer: Struct) -> Struct:
            return answer | {kept: [row for row in answer[kept] if row.get("error_code") or may(access, row)]}

        return complete

    return rule


# --------------------------------------------------------------------------------------------- rows of the answers
_OFFSETS: Final = ("base_offset", "high_watermark", "last_stable_offset", "log_start_offset", "low_watermark")
_NO_OFFSETS: Final[Struct] = dict.fromkeys(_OFFSETS, -1) | {
    "records": list[bytes](),
    "committed_offset": -1,
    "metadata": "",
}


def _parts(
    asked: str, asked_index: str | None, answered: str, answered_index: str, code_name: str = "error_code"
) -> Row:
    """A topic with its partitions. Without `asked_index` the request lists plain numbers."""

    def row(topic: Struct, code: KafkaError) -> Refused:
        numbers = [part if asked_index is None else part[asked_index] for part in topic[asked] or []]
        name = topic.get("name") or topic.get("topic") or ""
        out: Struct = {"name": name, "topic": name, "topic_id": topic.get("topic_id", NO_TOPIC_ID)}
        rest = _NO_OFFSETS
        out[answered] = [{answered_index: number, code_name: code, **rest} for number in numbers]
        return Refused(out)

    return row


_INDEXED: Final = _parts("partitions", "partition_index", "partitions", "partition_index")
_NUMBERED: Final = _parts("partition_indexes", None, "partitions", "partition_index")
_PLAIN: Final = _parts("partitions", "partition", "partitions", "partition")
_FETCHED: Final = _parts("partitions", "partition", "partitions", "partition_index")
_AGAIN: Final = _parts("partitions", "partition_index", "partitions", "partition_index")  # of an answer
_PRODUCED: Final = _parts("partition_data", "index", "partition_responses", "index")
_IN_TRANSACTION: Final = _parts("partitions", None, "results_by_partition", "partition_index", "partition_error_code")


def _topic_row(topic: Struct, code: KafkaError) -> Refused:
    fields = {"name": topic.get("name") or "", "topic_id": topic.get("topic_id", NO_TOPIC_ID), "error_code": code}
    return Refused(fields | {"error_message": _MESSAGE, "topic_authorized_operations": _NOT_ASKED})


def _named_row(field: str) -> Row:
    return lambda name, code: Refused({field: name, "error_code": code, "error_message": _MESSAGE})


def _all(asked: str, answered: str, row: Row) -> Callable[[Struct, KafkaError], Struct]:
    """An answer in which each of a list has the error."""
    return lambda request, code: {answered: [row(item, code) for item in request[asked] or []]}


# ------------------------------------------------------------------------------------------- what needs more words
def _metadata(access: Access, version: int, request: Struct) -> Complete:
    """Nothing is a refusal of the whole: clients take no notice of an answer without the nodes."""
    asked = request["topics"]
    is_all = asked is None or (version == 0 and not asked)
    rows = list[Refused]()
    if not is_all:
        faults = [(topic, access.fault(Operation.DESCRIBE, topic)) for topic in asked]
        rows = [_topic_row(topic, code) for topic, code in faults if code is not KafkaError.NONE]
        request["topics"] = [topic for topic, code in faults if code is KafkaError.NONE]
        may_create = _may_create(access)
        for topic in request["topics"]:  # one that the user may not create is not created by asking for it
            topic[MAY_CREATE] = may_create(topic)
    is_any_left = is_all or bool(request["topics"])  # of version 0 an empty list means all to the handler

    def shown(answer: Struct) -> Struct:
        topics = [topic for topic in answer["topics"] if is_any_left and access.sees(topic)]
        for topic in topics:
            bits, name = topic["topic_authorized_operations"], topic["name"]
            topic["topic_authorized_operations"] = access.bits(bits, _OF_TOPIC, Resource.TOPIC, name)
        return _own_cluster_bits(access, answer | {"topics": [*topics, *rows]})

    return shown


MAY_CREATE: Final = "may_create"  # of a topic in a request for Metadata, beside the protocol's fields


def _may_create(access: Access) -> Callable[[Struct], bool]:
    may_all = access.may_cluster(Operation.CREATE)
    return lambda topic: may_all or access.may(Operation.CREATE, Resource.TOPIC, topic["name"] or "")


def _own_cluster_bits(access: Access, answer: Struct) -> Struct:
    bits = answer.get("cluster_authorized_operations", _NOT_ASKED)
    own = access.bits(bits, _OF_CLUSTER, Resource.CLUSTER, CLUSTER_NAME)
    return answer | {"cluster_authorized_operations": own}


def _then(first: Complete, second: Complete | None) -> Complete:
    return (lambda answer: second(first(answer))) if second is not None else first


def _describe_cluster(access: Access, _version: int, _request: Struct) -> Complete:
    """Every user finds the nodes."""
    return lambda answer: _own_cluster_bits(access, answer)


def _describe_topic_partitions(access: Access, version: int, request: Struct) -> Complete:
    """A list of all is one of those that the user sees: otherwise pages would say by their ends what they leave out."""
    if request["topics"]:
        complete = _topics(Operation.DESCRIBE, _topic_row)(access, version, request)
    else:
        complete = None
        request["topics"] = [{"name": name} for name in access.seen_topics()]
        if not request["topics"]:
            raise Refusal({"topics": []})

    def shown(answer: Struct) -> Struct:
        topics = [topic for topic in answer["topics"] if access.sees({"name": topic["name"]})]
        for topic in topics:
            bits, name = topic["topic_authorized_operations"], topic["name"]
            topic["topic_authorized_operations"] = access.bits(bits, _OF_TOPIC, Resource.TOPIC, name)
        return answer | {"topics": topics}

    return _then(shown, complete)


def _described_groups(asked: str) -> Rule:
    def rule(access: Access, version: int, request: Struct) -> Complete:
        row = _named_row("group_id")
        complete = _names(Operation.DESCRIBE, Resource.GROUP, asked, "groups", row)(access, version, request)

        def shown(answer: Struct) -> Struct:
            for group in answer["groups"]:
                bits = group["authorized_operations"]
                group["authorized_operations"] = access.bits(bits, _OF_GROUP, Resource.GROUP, group["group_id"])
            return answer

        return _then(shown, complete)

    return rule


def _described_consumers(access: Access, version: int, request: Struct) -> Complete:
    """A group with a topic that the user may not see has an error instead of its members, as in Kafka."""
    complete = _described_groups("group_ids")(access, version, request)
    assert complete is not None, "its operations are always completed"

    def shown(answer: Struct) -> Struct:
        code = KafkaError.TOPIC_AUTHORIZATION_FAILED
        hidden = {"members": [], "error_code": code, "error_message": _MESSAGE}
        groups = [group if _sees_members(access, group) else group | hidden for group in answer["groups"]]
        return answer | {"groups": groups}

    return _then(shown, complete)


def _sees_members(access: Access, group: Struct) -> bool:
    for member in group["members"]:
        parts = [*member["assignment"]["topic_partitions"], *member["target_assignment"]["topic_partitions"]]
        names = {*member["subscribed_topic_names"], *(part["topic_name"] for part in parts)} - {""}
        if not all(access.may(Operation.DESCRIBE, Resource.TOPIC, name) for name in names):
            return False
    return True


def _consumer_heartbeat(access: Access, _version: int, request: Struct) -> None:
    """The topics that it names must be the user's to see. A pattern finds only those."""

    def may_see(name: str) -> bool:
        return access.may(Operation.DESCRIBE, Resource.TOPIC, name)

    if not all(map(may_see, request["subscribed_topic_names"] or ())):
        raise Refusal({"error_code": KafkaError.TOPIC_AUTHORIZATION_FAILED, "error_message": _MESSAGE})
    request["may_see"] = may_see


_MANY_GROUPS_VERSION: Final = 8


def _offset_fetch(access: Access, version: int, request: Struct) -> Complete:
    def fault(_: Access, group: Struct) -> KafkaError:
        is_allowed = access.may(Operation.DESCRIBE, Resource.GROUP, group["group_id"])
        return KafkaError.NONE if is_allowed else KafkaError.GROUP_AUTHORIZATION_FAILED

    def own(asked: Struct, group: Struct) -> Struct:
        """Topics that the user may not see are left out, or have an error if it has named them."""
        seen = [topic for topic in group["topics"] if access.sees(topic)]
        rest = [topic for topic in group["topics"] if not access.sees(topic)] if asked["topics"] is not None else []
        return group | {"topics": [*seen, *map(_hidden, rest)]}

    if version < _MANY_GROUPS_VERSION:
        if (code := fault(access, request)) is not KafkaError.NONE:
            rows = [_NUMBERED(topic, code) for topic in request["topics"] or []]
            raise Refusal({"error_code": code, "topics": rows})
        return lambda answer: own(request, answer)
    complete = _listed("groups", "groups", _group_row, fault)(access, version, request)
    asked = request["groups"]  # in the order of the answers; a group may be in it twice
    return _then(
        lambda answer: answer | {"groups": [own(*pair) for pair in zip(asked, answer["groups"], strict=True)]},
        complete,
    )


def _group_row(group: Struct, code: KafkaError) -> Refused:
    return Refused({"group_id": group["group_id"], "error_code": code})


def _hidden(topic: Struct) -> Struct:
    nothing = {"committed_offset": -1, "committed_leader_epoch": -1, "metadata": ""}
    code = {"error_code": KafkaError.TOPIC_AUTHORIZATION_FAILED}
    return topic | {"partitions": [part | nothing | code for part in topic["partitions"]]}


def _fetch(access: Access, version: int, request: Struct) -> Complete:
    """A right that ends while a fetch waits for records ends it, too."""
    complete = _topics(Operation.READ, _FETCHED, answered="responses")(access, version, request)

    before = access.rules

    def still(answer: Struct) -> Struct:
        if access.rules is before:
            return answer
        rows = []
        for topic in answer["responses"]:
            code = access.fault(Operation.READ, topic)
            rows.append(topic if code is KafkaError.NONE else _AGAIN(topic, code))
        return answer | {"responses": rows}

    return _then(still, complete)


def _describe_transactions(access: Access, version: int, request: Struct) -> Complete:
    row = _named_row("transactional_id")
    rule = _names(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "transactional_ids", "transaction_states", row)
    complete = rule(access, version, request)

    def shown(answer: Struct) -> Struct:
        for state in answer["transaction_states"]:
            state["topics"] = [topic for topic in state.get("topics", []) if access.sees(topic)]
        return answer

    return _then(shown, complete)


def _elections_refused(request: Struct, code: KafkaError) -> Struct:
    row = _parts("partitions", None, "partition_result", "partition_id")
    rows = [row(topic, code) for topic in request["topic_partitions"] or []]
    return {"error_code": code, "replica_election_results": rows}


_MANY_KEYS_VERSION: Final = 4
_COORDINATED: Final = {0: Resource.GROUP, 1: Resource.TRANSACTIONAL_ID}


def _find_coordinator(access: Access, version: int, request: Struct) -> Complete | None:
    resource = _COORDINATED.get(request["key_type"])
    if resource is None:
        return None  # the handler refuses it
    if version >= _MANY_KEYS_VERSION:
        rule = _names(Operation.DESCRIBE, resource, "coordinator_keys", "coordinators", _key_row)
        return rule(access, version, request)
    if not access.may(Operation.DESCRIBE, resource, request["key"]):
        raise Refusal(_key_row(request["key"], CODES[resource]))
    return None


def _key_row(key: str, code: KafkaError) -> Refused:
    return Refused({"key": key, "error_code": code, "error_message": _MESSAGE, "node_id": -1, "port": -1})


def _init_producer_id(access: Access, _version: int, request: Struct) -> None:
    name = request["transactional_id"]
    if name is not None:
        if not access.may(Operation.WRITE, Resource.TRANSACTIONAL_ID, name):
            raise Refusal({"error_code": KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED})
    elif not access.may_cluster(Operation.IDEMPOTENT_WRITE) and not access.may_any(Operation.WRITE, Resource.TOPIC):
        raise Refusal({"error_code": KafkaError.CLUSTER_AUTHORIZATION_FAILED})
    else:  # as in Kafka: an id has no owner, and its next epoch would fence the producer that has it
        request |= {"producer_id": -1, "producer_epoch": -1}


def _add_partitions(access: Access, _version: int, request: Struct) -> None:
    """All or none, as in Kafka."""
    topics, failed = request["v3_and_below_topics"], dict[str, KafkaError]()
    if not access.may(Operation.WRITE, Resource.TRANSACTIONAL_ID, request["v3_and_below_transactional_id"]):
        code = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        failed = dict.fromkeys((topic["name"] for topic in topics), code)
        if not topics:
            raise Refusal({"error_code": code, "results_by_topic_v3_and_below": []})
    else:
        codes = {topic["name"]: access.fault(Operation.WRITE, topic) for topic in topics}
        failed = {name: code for name, code in codes.items() if code is not KafkaError.NONE}
    if failed:
        rest = KafkaError.OPERATION_NOT_ATTEMPTED
        rows = [_IN_TRANSACTION(topic, failed.get(topic["name"], rest)) for topic in topics]
        raise Refusal({"results_by_topic_v3_and_below": rows})


def _creation_fault(access: Access, topic: Struct) -> KafkaError:
    return KafkaError.NONE if _may_create(access)(topic) else KafkaError.TOPIC_AUTHORIZATION_FAILED


def _create_topics(access: Access, version: int, request: Struct) -> Complete:
    """The settings that a new topic has need the right to see settings."""
    complete = _listed("topics", "topics", _topic_row, _creation_fault)(access, version, request)
    nothing = {"num_partitions": -1, "replication_factor": -1, "configs": []}
    hidden = nothing | {"topic_config_error_code": KafkaError.TOPIC_AUTHORIZATION_FAILED}

    def shown(answer: Struct) -> Struct:
        topics = [
            row
            if row["error_code"] or access.may(Operation.DESCRIBE_CONFIGS, Resource.TOPIC, row["name"])
            else row | hidden
            for row in answer["topics"]
        ]
        return answer | {"topics": topics}

    return _then(shown, complete)


_IDS_VERSION: Final = 6


def _delete_topics(access: Access, version: int, request: Struct) -> Complete | None:
    if version >= _IDS_VERSION:
        return _topics(Operation.DELETE, _topic_row, answered="responses")(access, version, request)
    rule = _names(Operation.DELETE, Resource.TOPIC, "topic_names", "responses", _named_row("name"))
    return rule(access, version, request)


_TOPIC_CONFIG, _GROUP_CONFIG = 2, 32


def _configs(operation: Operation, answered: str) -> Rule:
    def rule(access: Access, _version: int, request: Struct) -> Complete | None:
        rows, allowed = [], []
        for named in request["resources"]:
            kinds = {_TOPIC_CONFIG: Resource.TOPIC, _GROUP_CONFIG: Resource.GROUP}
            resource = kinds.get(named["resource_type"], Resource.CLUSTER)
            name = CLUSTER_NAME if resource is Resource.CLUSTER else named["resource_name"]
            if access.may(operation, resource, name):
                allowed.append(named)
                continue
            fields = {key: named[key] for key in ("resource_type", "resource_name")}
            rows.append(Refused({"error_code": CODES[resource], "error_message": _MESSAGE} | fields))
        if rows and not allowed:
            raise Refusal({answered: rows})
        request["resources"] = allowed
        return (lambda answer: answer | {answered: [*answer[answered], *rows]}) if rows else None

    return rule


def _entry_row(entry: Struct, code: KafkaError) -> Refused:
    return Refused({"entity": entry["entity"], "error_code": code, "error_message": _MESSAGE})


def _users_refused(request: Struct, code: KafkaError) -> Struct:
    names = dict.fromkeys(change["name"] for kind in ("deletions", "upsertions") for change in request[kind])
    return {"results": [{"user": name, "error_code": code, "error_message": _MESSAGE} for name in names]}


def _plain_row(_item: Any, code: KafkaError) -> Refused:
    return Refused({"error_code": code, "error_message": _MESSAGE})


def _field(name: str) -> Callable[[Struct], str | None]:
    return lambda request: request[name]


_GROUP_ID: Final = _field("group_id")
_TXN_ID: Final = _field("transactional_id")
_COMMITTED: Final = _all("topics", "topics", _INDEXED)
_MEMBER: Final = _whole(Operation.READ, Resource.GROUP, _GROUP_ID)

RULES: Final[Mapping[int, Rule]] = {
    ApiKey.PRODUCE: _in_order(
        _whole(Operation.WRITE, Resource.TRANSACTIONAL_ID, _TXN_ID, _all("topic_data", "responses", _PRODUCED)),
        _topics(Operation.WRITE, _PRODUCED, "topic_data", "responses"),
    ),
    ApiKey.FETCH: _fetch,
    ApiKey.LIST_OFFSETS: _topics(Operation.DESCRIBE, _INDEXED),
    ApiKey.METADATA: _metadata,
    ApiKey.OFFSET_COMMIT: _in_order(
        _whole(Operation.READ, Resource.GROUP, _GROUP_ID, _COMMITTED), _topics(Operation.READ, _INDEXED)
    ),
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.JOIN_GROUP: _MEMBER,
    ApiKey.HEARTBEAT: _MEMBER,
    ApiKey.LEAVE_GROUP: _MEMBER,
    ApiKey.SYNC_GROUP: _MEMBER,
    ApiKey.DESCRIBE_GROUPS: _described_groups("groups"),
    ApiKey.LIST_GROUPS: _seen(
        "groups",
        lambda access, group: (
            access.may_cluster(Operation.DESCRIBE) or access.may(Operation.DESCRIBE, Resource.GROUP, group["group_id"])
        ),
    ),
    ApiKey.SASL_HANDSHAKE: _free,
    ApiKey.API_VERSIONS: _free,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.DELETE_RECORDS: _topics(Operation.DELETE, _INDEXED),
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: _topics(Operation.DESCRIBE, _PLAIN),
    ApiKey.ADD_PARTITIONS_TO_TXN: _add_partitions,
    ApiKey.ADD_OFFSETS_TO_TXN: _in_order(_whole(Operation.WRITE, Resource.TRANSACTIONAL_ID, _TXN_ID), _MEMBER),
    ApiKey.END_TXN: _whole(Operation.WRITE, Resource.TRANSACTIONAL_ID, _TXN_ID),
    ApiKey.TXN_OFFSET_COMMIT: _in_order(
        _whole(Operation.WRITE, Resource.TRANSACTIONAL_ID, _TXN_ID, _COMMITTED),
        _whole(Operation.READ, Resource.GROUP, _GROUP_ID, _COMMITTED),
        _topics(Operation.READ, _INDEXED),
    ),
    ApiKey.DESCRIBE_ACLS: _cluster(Operation.DESCRIBE),
    ApiKey.CREATE_ACLS: _cluster(Operation.ALTER, _all("creations", "results", _plain_row)),
    ApiKey.DELETE_ACLS: _cluster(Operation.ALTER, _all("filters", "filter_results", _plain_row)),
    ApiKey.DESCRIBE_CONFIGS: _configs(Operation.DESCRIBE_CONFIGS, "results"),
    ApiKey.ALTER_CONFIGS: _configs(Operation.ALTER_CONFIGS, "responses"),
    ApiKey.DESCRIBE_LOG_DIRS: _cluster(Operation.DESCRIBE),
    ApiKey.SASL_AUTHENTICATE: _free,
    ApiKey.CREATE_PARTITIONS: _topics(Operation.ALTER, _topic_row, answered="results"),
    ApiKey.DELETE_GROUPS: _names(Operation.DELETE, Resource.GROUP, "groups_names", "results", _named_row("group_id")),
    ApiKey.ELECT_LEADERS: _cluster(Operation.ALTER, _elections_refused),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _configs(Operation.ALTER_CONFIGS, "responses"),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: _cluster(Operation.DESCRIBE),
    ApiKey.OFFSET_DELETE: _in_order(
        _whole(Operation.DELETE, Resource.GROUP, _GROUP_ID), _topics(Operation.READ, _INDEXED)
    ),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: _cluster(Operation.DESCRIBE_CONFIGS),
    ApiKey.ALTER_CLIENT_QUOTAS: _cluster(Operation.ALTER_CONFIGS, _all("entries", "entries", _entry_row)),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: _cluster(Operation.DESCRIBE),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _cluster(Operation.ALTER, _users_refused),
    ApiKey.DESCRIBE_QUORUM: _cluster(Operation.DESCRIBE),
    ApiKey.UPDATE_FEATURES: _cluster(Operation.ALTER),
    ApiKey.DESCRIBE_CLUSTER: _describe_cluster,
    ApiKey.DESCRIBE_PRODUCERS: _topics(Operation.READ, _NUMBERED),
    ApiKey.DESCRIBE_TRANSACTIONS: _describe_transactions,
    ApiKey.LIST_TRANSACTIONS: _seen(
        "transaction_states",
        lambda access, row: access.may(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, row["transactional_id"]),
    ),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _in_order(_MEMBER, _consumer_heartbeat),
    ApiKey.CONSUMER_GROUP_DESCRIBE: _described_consumers,
    ApiKey.LIST_CONFIG_RESOURCES: _cluster(Operation.DESCRIBE_CONFIGS),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _describe_topic_partitions,
}
