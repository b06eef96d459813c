"""What a user may do: the one place that decides, from the rules of the replicated state.

Owns the decision, by Kafka's rules: a user without a matching rule may do nothing, a rule that denies beats every rule
that allows, a right to change something is a right to see it, and the super users of node.toml may do everything. A
change of the rules is in force with the next decision after a node has applied it. It must never know a protocol.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from smq.coordinator.limits import DECISIONS_MAX
from smq.raft_state.commands import Acl
from smq.raft_state.handlers.acls import ANY, PRINCIPAL, Operation, Pattern, Permission, Resource
from smq.raft_state.state import ClusterState

# To do the first is to see what one does: an allowed operation allows these, too. A denied one denies itself alone.
_IMPLIED_BY: Final = {
    Operation.DESCRIBE: (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER),
    Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
}


class Authorizer:
    """`state` gives the node's present state."""

    def __init__(self, state: Callable[[], ClusterState], super_users: tuple[str, ...]) -> None:
        self._state = state
        self._super_users = frozenset(super_users)
        self._acls: tuple[Acl, ...] | None = None
        self._literal: dict[tuple[int, str], list[Acl]] = {}
        self._prefixed: dict[int, list[Acl]] = {}
        self._decided: dict[tuple[str, str, Operation, Resource, str], bool] = {}

    def is_super(self, user: str) -> bool:
        return user in self._super_users

    def may(self, user: str, host: str, operation: Operation, resource: Resource, name: str) -> bool:
        if user in self._super_users:
            return True
        self._follow()
        key = user, host, operation, resource, name
        known = self._decided.get(key)
        if known is None:
            known = self._decides(*key)
            if len(self._decided) >= DECISIONS_MAX:
                self._decided.clear()
            self._decided[key] = known
        return known

    def may_any(self, user: str, host: str, operation: Operation, resource: Resource) -> bool:
        """Whether a rule allows it for some name."""
        if user in self._super_users:
            return True
        allowed = (operation, Operation.ALL)
        return any(
            acl.permission == Permission.ALLOW and acl.resource == resource and acl.operation in allowed
            for acl in self._state().acls
            if _is_of(acl, user, host)
        )

    def why(self, user: str, host: str, operation: Operation, resource: Resource, name: str) -> tuple[bool, Acl | None]:
        """The decision, and the rule that it follows; none for a super user, or if no rule matches."""
        if user in self._super_users:
            return True, None
        self._follow()
        allowed: Acl | None = None
        allowing = (operation, Operation.ALL, *_IMPLIED_BY.get(operation, ()))
        for acl in self._matching(resource, name):
            if not _is_of(acl, user, host):
                continue
            if acl.permission == Permission.DENY and acl.operation in (operation, Operation.ALL):
                return False, acl
            if acl.permission == Permission.ALLOW and acl.operation in allowing:
                allowed = allowed or acl
        return allowed is not None, allowed

    def _decides(self, user: str, host: str, operation: Operation, resource: Resource, name: str) -> bool:
        return self.why(user, host, operation, resource, name)[0]

    def _matching(self, resource: Resource, name: str) -> Iterator[Acl]:
        yield from self._literal.get((resource, name), ())
        if name != ANY:
            yield from self._literal.get((resource, ANY), ())
        yield from (acl for acl in self._prefixed.get(resource, ()) if name.startswith(acl.name))

    def _follow(self) -> None:
        acls = self._state().acls
        if acls is self._acls:
            return
        literal, prefixed = defaultdict(list), defaultdict(list)
        for acl in acls:
            if acl.pattern == Pattern.PREFIXED:
                prefixed[acl.resource].append(acl)
            else:
                literal[acl.resource, acl.name].append(acl)
        self._literal, self._prefixed, self._decided, self._acls = dict(literal), dict(prefixed), {}, acls


def _is_of(acl: Acl, user: str, host: str) -> bool:
    return acl.principal in (PRINCIPAL + user, PRINCIPAL + ANY) and acl.host in (host, ANY)
