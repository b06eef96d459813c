"""The handler of AlterAcls.

Owns what a valid rule is, and Kafka's numbers of resources, patterns, operations and permissions. It must never decide
what a user may do, and never change the rules in place: a reader that compares them with earlier ones learns of every
change. `command_table`, `invariants` and the server import it.
"""

import enum
from typing import Final

from smq.raft_state.commands import Acl, AlterAcls
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import ACL_NAME_BYTES_MAX, ACLS_MAX, HOST_BYTES_MAX, USER_NAME_BYTES_MAX
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState

ANY: Final = "*"
CLUSTER_NAME: Final = "kafka-cluster"  # the one name of the resource CLUSTER
PRINCIPAL: Final = "User:"


class Resource(enum.IntEnum):
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class Pattern(enum.IntEnum):
    LITERAL = 3
    PREFIXED = 4


class Operation(enum.IntEnum):
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class Permission(enum.IntEnum):
    DENY = 2
    ALLOW = 3


def alter_acls(state: ClusterState, command: AlterAcls) -> Applied:
    """All of it, or nothing."""
    for acl in command.add:
        if (fault := acl_fault(acl)) is not None:
            raise Refused(ErrorCode.INVALID_REQUEST, fault)
    found = (set(state.acls) - set(command.remove)) | set(command.add)
    if len(found) > ACLS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"the cluster may have {ACLS_MAX} rules, not {len(found)}")
    state.acls = tuple(sorted(found))
    return Applied(reply=Done())


def acl_fault(acl: Acl) -> str | None:
    for number, kinds in ((acl.resource, Resource), (acl.pattern, Pattern), (acl.operation, Operation)):
        if number not in tuple(kinds):
            return f"{kinds.__name__.lower()} {number} is none of {', '.join(kind.name for kind in kinds)}"
    if acl.permission not in tuple(Permission):
        return f"permission {acl.permission} is none of DENY, ALLOW"
    if acl.resource == Resource.CLUSTER and (acl.name, acl.pattern) != (CLUSTER_NAME, Pattern.LITERAL):
        return f"the cluster is the literal name {CLUSTER_NAME}, not {quoted(acl.name)}"
    user = acl.principal.removeprefix(PRINCIPAL)
    if not acl.principal.startswith(PRINCIPAL) or not 1 <= len(user.encode()) <= USER_NAME_BYTES_MAX:
        return f"a principal is {PRINCIPAL}NAME, or {PRINCIPAL}{ANY} for all, not {quoted(acl.principal)}"
    if not 1 <= len(acl.name.encode()) <= ACL_NAME_BYTES_MAX or not 1 <= len(acl.host.encode()) <= HOST_BYTES_MAX:
        return f"a name has 1 to {ACL_NAME_BYTES_MAX} bytes, and a host 1 to {HOST_BYTES_MAX}"
    return None
