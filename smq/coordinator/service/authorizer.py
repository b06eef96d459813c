"""What a user may do: the one place that decides, from the rules of the replicated state.

Owns the decision, by Kafka's rules: a user without a matching rule may do nothing, a rule that denies beats every rule
that allows, a right to change something is a right to see it, and the super users of node.toml may do everything. A
change of the rules is in force with the next decision after a node has applied it. It must never know a protocol.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Final

from smq.coordinator.limits import DECISIONS_MAX
from smq.raft_state.commands import Acl
from smq.raft_state.handlers.acls import ANY, PRINCIPAL, Operation, Pattern, Permission, Resource
from smq.raft_state.limits import ACL_NAME_BYTES_MAX
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
        self.super_users = super_users
        self._acls: tuple[Acl, ...] | None = None
        # By principal first: what a user asks for costs as much as the rules about that user, not as all.
        self._all: dict[str, list[Acl]] = {}
        self._literal: dict[tuple[str, int, str], list[Acl]] = {}
        self._prefixed: dict[tuple[str, int], list[Acl]] = {}
        self._hosts: dict[str, str] = {}  # as a rule writes an address -> as sockets do
        self._decided: dict[tuple[str, str, Operation, Resource, str], bool] = {}

    @property
    def rules(self) -> object:
        """Another object after each change of any rule."""
        return self._state().acls

    def is_super(self, user: str) -> bool:
        return user in self.super_users

    def may(self, user: str, host: str, operation: Operation, resource: Resource, name: str) -> bool:
        if user in self.super_users:
            return True
        self._follow()
        key = user, host, operation, resource, name
        known = self._decided.get(key)
        if known is None:
            known = self.why(*key)[0]
            if len(self._decided) >= DECISIONS_MAX:
                self._decided.clear()
            if len(name) <= ACL_NAME_BYTES_MAX:  # of a request a name may have as many bytes as the request
                self._decided[key] = known
        return known

    def may_any(self, user: str, host: str, operation: Operation, resource: Resource) -> bool:
        """Whether a rule allows it for some name, and no rule denies it for all those names."""
        if user in self.super_users:
            return True
        self._follow()
        # What a prefix allows is judged by a name of it that no literal rule has.
        names = {
            acl.name + "\0" if acl.pattern == Pattern.PREFIXED else acl.name
            for principal in _principals(user)
            for acl in self._all.get(principal, ())
            if acl.permission == Permission.ALLOW and acl.resource == resource
        }
        return any(self.may(user, host, operation, resource, name) for name in names)

    def may_every(self, user: str, host: str, operation: Operation, resource: Resource) -> bool:
        """Whether a rule allows it for all names, and no rule denies it for one."""
        if self.is_super(user):
            return True
        if not self.may(user, host, operation, resource, ANY):
            return False
        own = (acl for principal in _principals(user) for acl in self._all.get(principal, ()))
        denied = (acl for acl in own if acl.permission == Permission.DENY and acl.resource == resource)
        return not any(acl.operation in (operation, Operation.ALL) for acl in denied)

    def why(self, user: str, host: str, operation: Operation, resource: Resource, name: str) -> tuple[bool, Acl | None]:
        """The decision, and the rule that it follows; none for a super user, or if no rule matches."""
        if user in self.super_users:
            return True, None
        self._follow()
        allowed: Acl | None = None
        allowing = (operation, Operation.ALL, *_IMPLIED_BY.get(operation, ()))
        address = _address(host)
        for acl in self._matching(user, resource, name):
            if self._hosts[acl.host] not in (address, ANY):
                continue
            if acl.permission == Permission.DENY and acl.operation in (operation, Operation.ALL):
                return False, acl
            if acl.permission == Permission.ALLOW and acl.operation in allowing:
                allowed = allowed or acl
        return allowed is not None, allowed

    def _matching(self, user: str, resource: Resource, name: str) -> Iterator[Acl]:
        for principal in _principals(user):
            yield from self._literal.get((principal, resource, name), ())
            if name != ANY:
                yield from self._literal.get((principal, resource, ANY), ())
            yield from (acl for acl in self._prefixed.get((principal, resource), ()) if name.startswith(acl.name))

    def _follow(self) -> None:
        acls = self._state().acls
        if acls is self._acls:
            return
        everything, literal, prefixed = defaultdict(list), defaultdict(list), defaultdict(list)
        for acl in acls:
            everything[acl.principal].append(acl)
            if acl.pattern == Pattern.PREFIXED:
                prefixed[acl.principal, acl.resource].append(acl)
            else:
                literal[acl.principal, acl.resource, acl.name].append(acl)
        self._all, self._literal, self._prefixed = dict(everything), dict(literal), dict(prefixed)
        self._hosts = {host: _address(host) for host in {acl.host for acl in acls}}
        self._decided, self._acls = {}, acls


def host_fault(host: str) -> str | None:
    """Of a new rule. A network or a name would match no client, so a rule that denies it would deny nothing. Not part
    of the replicated state's own check: Python's versions differ about a few texts."""
    try:
        if host != ANY:
            ip_address(host)
    except ValueError:
        return f"a host is an IP address, or {ANY} for all, not {host[:80]!r}"
    return None


def _principals(user: str) -> tuple[str, str]:
    return PRINCIPAL + user, PRINCIPAL + ANY


def _address(host: str) -> str:
    """The one way to write it: Java writes ::1 as 0:0:0:0:0:0:0:1, and a socket may add the network's name."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)
