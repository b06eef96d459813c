"""The handlers of AlterUser and DeleteUser.

Owns what a valid user and a valid credential are. It must never see a password, and never change a mapping of users in
place: who compares it with an earlier one learns of every change. `command_table`, `invariants` and the server import
it.
"""

from typing import Final

from smq.raft_state.commands import AlterUser, DeleteUser, ScramCredential
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.acls import ANY
from smq.raft_state.limits import (
    DECOY_SECRET_BYTES,
    SCRAM_ITERATIONS_MAX,
    SCRAM_ITERATIONS_MIN,
    SCRAM_SALT_BYTES_MAX,
    USER_NAME_BYTES_MAX,
    USERS_MAX,
)
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, UserState

KEY_BYTES: Final = {1: 32, 2: 64}  # by mechanism, under Kafka's numbers: SCRAM-SHA-256, SCRAM-SHA-512
_DELETE: Final = 0x7F


def alter_user(state: ClusterState, command: AlterUser) -> Applied:
    """All of it, or nothing."""
    name, old = command.name, state.users.get(command.name)
    if (fault := name_fault(name)) is not None:
        raise Refused(ErrorCode.INVALID_CREDENTIAL, fault)
    changed = [*(credential.mechanism for credential in command.set_), *command.unset]
    if not changed or len(set(changed)) < len(changed):
        raise Refused(
            ErrorCode.INVALID_CREDENTIAL, f"name each mechanism of user {quoted(name)} once, and at least one"
        )
    for credential in command.set_:
        if (fault := credential_fault(credential)) is not None:
            raise Refused(ErrorCode.INVALID_CREDENTIAL, f"user {quoted(name)}: {fault}")
    if old is not None and not command.may_replace:
        raise Refused(ErrorCode.USER_EXISTS, f"there is a user {quoted(name)}")
    if old is None and not command.may_create:
        raise Refused(ErrorCode.UNKNOWN_USER, f"there is no user {quoted(name)}")
    if old is None and command.set_ and len(state.users) >= USERS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"the cluster has {USERS_MAX} users, the most that it may have")
    kept = {credential.mechanism: credential for credential in (old.credentials if old is not None else ())}
    for mechanism in command.unset:
        if kept.pop(mechanism, None) is None:
            raise Refused(ErrorCode.UNKNOWN_USER, f"user {quoted(name)} has no credential of mechanism {mechanism}")
    kept |= {credential.mechanism: credential for credential in command.set_}
    users = {other: user for other, user in state.users.items() if other != name}
    if not kept:
        _keep_administrator(state, name, command.administrators)
    else:
        users[name] = UserState(name=name, credentials=tuple(kept[mechanism] for mechanism in sorted(kept)))
    state.users = users
    if not state.decoy_secret and len(command.decoy_secret) == DECOY_SECRET_BYTES:
        state.decoy_secret = command.decoy_secret
    return Applied(reply=Done())


def delete_user(state: ClusterState, command: DeleteUser) -> Applied:
    if command.name not in state.users:
        raise Refused(ErrorCode.UNKNOWN_USER, f"there is no user {quoted(command.name)}")
    _keep_administrator(state, command.name, command.administrators)
    state.users = {name: user for name, user in state.users.items() if name != command.name}
    return Applied(reply=Done())


def _keep_administrator(state: ClusterState, name: str, administrators: tuple[str, ...]) -> None:
    """Refused if no super user were left. Judged here, so that two deletions at a time leave one."""
    if name in administrators and not any(other in state.users for other in administrators if other != name):
        reason = "is the last of the super users, and was not deleted: create another one of super_users first"
        raise Refused(ErrorCode.INVALID_REQUEST, f"user {quoted(name)} {reason}")


def name_fault(name: str) -> str | None:
    """Control characters would end up in logs and terminals; and NUL separates the fields of PLAIN. A rule about *
    concerns everyone."""
    if name == ANY:
        return f"no user may have the name {ANY}, which stands for all users in rules"
    size = len(name.encode())
    if not 1 <= size <= USER_NAME_BYTES_MAX:
        return f"a user's name has 1 to {USER_NAME_BYTES_MAX} bytes of UTF-8, not {size}"
    if any(char < " " or ord(char) == _DELETE for char in name):
        return f"the user's name {quoted(name)} has a control character"
    return None


def credential_fault(credential: ScramCredential) -> str | None:
    key_bytes = KEY_BYTES.get(credential.mechanism)
    if key_bytes is None:
        return f"mechanism {credential.mechanism} is none of {', '.join(map(str, KEY_BYTES))}"
    if not SCRAM_ITERATIONS_MIN <= credential.iterations <= SCRAM_ITERATIONS_MAX:
        limits = f"{SCRAM_ITERATIONS_MIN} to {SCRAM_ITERATIONS_MAX}"
        return f"{credential.iterations} iterations: {limits} are allowed"
    if not 1 <= len(credential.salt) <= SCRAM_SALT_BYTES_MAX:
        return f"a salt of {len(credential.salt)} bytes: 1 to {SCRAM_SALT_BYTES_MAX} are allowed"
    if {len(credential.stored_key), len(credential.server_key)} != {key_bytes}:
        return f"the keys of mechanism {credential.mechanism} have {key_bytes} bytes each"
    return None
