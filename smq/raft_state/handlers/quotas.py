"""The handler of AlterQuotas.

Owns what a valid quota is: Kafka's kinds of entities and its keys. It must never decide which quota a client has, and
never change the quotas in place: a reader that compares them with earlier ones learns of every change. `command_table`,
`invariants` and the server import it.
"""

import enum
from typing import Final, NamedTuple

from smq.raft_state.commands import AlterQuotas, Quota
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import QUOTA_MAX, QUOTA_NAME_BYTES_MAX, QUOTAS_MAX
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
DEFAULT: Final = ""  # in place of a name
THOUSAND: Final = 1000
_CLIENTS: Final = ((CLIENT_ID,), (USER,), (CLIENT_ID, USER))  # the kinds that make an entity


class Key(enum.StrEnum):
    PRODUCED = "producer_byte_rate"
    CONSUMED = "consumer_byte_rate"
    REQUESTS = "request_percentage"
    MUTATIONS = "controller_mutation_rate"
    CONNECTIONS = "connection_creation_rate"


class _Row(NamedTuple):
    entities: tuple[tuple[str, ...], ...]
    is_whole: bool


_KEYS: Final = {
    Key.PRODUCED: _Row(_CLIENTS, is_whole=True),
    Key.CONSUMED: _Row(_CLIENTS, is_whole=True),
    Key.REQUESTS: _Row(_CLIENTS, is_whole=False),
    Key.MUTATIONS: _Row(_CLIENTS, is_whole=False),
    Key.CONNECTIONS: _Row(((IP,),), is_whole=True),
}


def alter_quotas(state: ClusterState, command: AlterQuotas) -> Applied:
    """All of it, or nothing."""
    for quota in command.quotas:
        if (fault := quota_fault(quota)) is not None:
            raise Refused(ErrorCode.INVALID_REQUEST, fault)
    found = {quota[:2]: quota for quota in (*state.quotas, *command.quotas)}
    kept = sorted(quota for quota in found.values() if quota.thousandths)
    if len(kept) > QUOTAS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"the cluster may have {QUOTAS_MAX} quotas, not {len(kept)}")
    state.quotas = tuple(kept)
    return Applied(reply=Done())


def quota_fault(quota: Quota) -> str | None:
    row = _KEYS.get(Key(quota.key)) if quota.key in tuple(Key) else None
    if row is None:
        return f"{quoted(quota.key)} is none of {', '.join(Key)}"
    kinds = tuple(kind for kind, _ in quota.entity)
    if kinds not in row.entities:
        return f"{quota.key} is for {' or '.join('+'.join(known) for known in row.entities)}, each once"
    if any(len(name.encode()) > QUOTA_NAME_BYTES_MAX for _, name in quota.entity):
        return f"a name has at most {QUOTA_NAME_BYTES_MAX} bytes"
    if not 0 <= quota.thousandths <= QUOTA_MAX * THOUSAND:
        return f"{quota.key} is above 0, and at most {QUOTA_MAX}"
    if row.is_whole and quota.thousandths % THOUSAND:
        return f"{quota.key} is a whole number"
    return None
