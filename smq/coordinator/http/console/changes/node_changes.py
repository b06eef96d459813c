"""Changes of a node and of a transaction: to drain a node and back, and to abort a transaction.

Owns what they show. `changes.pages` imports it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from smq.clients import Admin
from smq.coordinator.http.console.changes.plan import Action, Change, Plan
from smq.coordinator.http.console.markup import Content, facts, tag
from smq.coordinator.http.console.refusals import BadRequest
from smq.coordinator.operators.formats import age_text
from smq.coordinator.user_errors import UserError
from smq.raft_state.state import NodeState

_OPEN: Final = "Ongoing"


def _number(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 11):
        raise BadRequest("a node has a number")
    return int(name)


async def _plan_node(admin: Admin, name: str, *, drained: bool) -> Plan:
    number = _number(name)
    cluster = await admin.describe_cluster()
    found = next((node for node in cluster.nodes if node.node == number), None)
    if found is None:
        raise BadRequest(f"there is no node {number}")
    led = sum(p.leader == number for topic in cluster.topics for p in topic.partitions)
    others = [n.node for n in cluster.nodes if n.node != number and not n.fenced and not n.drained]
    if drained:
        text = f"Node {number} leads {led:,} partitions. It would hand over those that another replica can lead."
        if not others:
            text += " No other node is in service: it would keep all of them."
    else:
        text = f"Node {number} would lead again. It gets its leaderships back within seconds."
    is_due = found.drained != drained
    is_already = "drained" if drained else "in service"
    content = [tag("p", text if is_due else f"Node {number} is {is_already} already.")]
    return Plan(content=content, change={} if is_due else None, button=f"{'Drain' if drained else 'Undrain'} the node")


async def _plan_drain(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    return await _plan_node(admin, name, drained=True)


async def _plan_undrain(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    return await _plan_node(admin, name, drained=False)


async def _make_drain(admin: Admin, name: str, change: Change) -> str:
    await admin.set_node_drained(_number(name), True)
    return f"node {name}: to be drained"


async def _make_undrain(admin: Admin, name: str, change: Change) -> str:
    await admin.set_node_drained(_number(name), False)
    return f"node {name}: in service again"


async def _plan_abort(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    found = await admin.describe_transaction(name)
    summary = found.summary
    if summary.state != _OPEN:
        raise UserError(f"transactional id {name!r} has no open transaction: it is {summary.state}")
    shown = facts(
        (
            ("Open for", age_text(summary.open_ms)),
            ("Times out after", age_text(summary.timeout_ms)),
            ("Producer", f"{summary.producer_id} in epoch {summary.producer_epoch}"),
            ("Partitions", len(found.partitions)),
            ("Groups", ", ".join(found.groups) or "-"),
        )
    )
    text = "Its records would never be read, and its producer would have to start again."
    change = [summary.producer_id, summary.producer_epoch]
    return Plan(content=[shown, tag("p", text)], change=change, button="Abort the transaction")


async def _make_abort(admin: Admin, name: str, change: Change) -> str:
    """The transaction of the producer that was shown, and not one that its successor has begun."""
    summary = (await admin.describe_transaction(name)).summary
    if [summary.producer_id, summary.producer_epoch] != change or summary.state != _OPEN:
        raise UserError("the transaction that was shown has ended meanwhile")
    await admin.abort_transaction(name)
    return f"transactional id {name}: transaction aborted"


def _front(_name: str) -> str:
    return ""


DRAIN: Final = Action(
    section="nodes", verb="drain", title="Drain node", plan=_plan_drain, make=_make_drain, back=_front
)
UNDRAIN: Final = Action(
    section="nodes", verb="undrain", title="Undrain node", plan=_plan_undrain, make=_make_undrain, back=_front
)
ABORT: Final = Action(
    section="transactions", verb="abort", title="Abort the transaction", plan=_plan_abort, make=_make_abort
)


def node_links(nodes: Iterable[NodeState]) -> list[Content]:
    """On the first page."""
    links = [
        UNDRAIN.link(f"Undrain node {n.node}", str(n.node))
        if n.drained
        else DRAIN.link(f"Drain node {n.node}", str(n.node))
        for n in nodes
    ]
    return [tag("nav", tag("ul", *(tag("li", each) for each in links)), aria_label="Changes of nodes")]


def transaction_links(name: str, *, is_open: bool) -> list[Content]:
    """On the transaction's page."""
    return [tag("p", ABORT.link("Abort this transaction", name))] if is_open else []
