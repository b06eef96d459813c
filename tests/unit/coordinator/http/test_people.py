"""The HTTP port where users log in: what each may see, the cookie, and how a revoked user's page ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import HttpConfig
from smq.coordinator.http.people import COOKIE
from smq.raft_state.commands import AlterAcls, AlterUser, Command, CreateTopic, DeleteUser
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Permission, Resource
from smq.raft_state.ids import TopicId
from smq.testing.served import PATIENCE_S, Served, served_node
from tests.unit.coordinator.kafka.test_logins import keys
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of, dialling
from tests.unit.raft_state.support import acl

__all__ = ("authorities",)  # a fixture

RULE = HttpConfig(users=True, console_changes=True)
SEEN = (Resource.TOPIC, Resource.GROUP, Resource.TRANSACTIONAL_ID)
ON_CLUSTER = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
ALL = (
    *(acl("*", Operation.DESCRIBE, resource=resource) for resource in SEEN),
    *(acl(CLUSTER_NAME, operation, resource=Resource.CLUSTER) for operation in ON_CLUSTER),
)
HIDDEN = acl("t", Operation.DESCRIBE, Permission.DENY, resource=Resource.TOPIC)


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": aiohttp.encode_basic_auth(user, password)}


class Port:
    def __init__(self, served: Served, authorities: Authorities) -> None:
        self.served = served
        self.stranger, self.operator = dialling(None), dialling(authorities.client())
        self.base = f"https://{format_address(served.server.http_address)}"

    async def change(self, command: Command) -> None:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.served.server.node.propose(command, 5_000, done.set_result)
        assert not isinstance(await done, SmqError)

    async def status(
        self,
        path: str,
        user: str = "",
        password: str = "pencil",
        *,
        session: aiohttp.ClientSession | None = None,
        **fields: Any,
    ) -> int:
        fields["headers"] = fields.get("headers", {}) | (basic(user, password) if user else {})
        own = session or aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        try:
            method = own.post if "data" in fields else own.get
            fields.setdefault("ssl", self.stranger)
            async with method(self.base + path, **fields) as response:
                return response.status
        finally:
            if session is None:
                await own.close()


@asynccontextmanager
async def http_port(directory: Path, authorities: Authorities) -> AsyncIterator[Port]:
    files = config_of(authorities.node(1))
    async with served_node(directory, tls=files, http=RULE, super_users=("root",)) as served:
        port = Port(served, authorities)
        topic = CreateTopic(
            name="t", topic_id=TopicId(b"t" * 16), partition_count=1, replication_factor=1, created_ms=0
        )
        await port.change(topic)
        for user in ("alice", "root"):
            await port.change(AlterUser(name=user, set_=keys("pencil"), decoy_secret=b"d" * 32))
        yield port


@asynccontextmanager
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def test_each_page_needs_a_user_and_its_rights(authorities: Authorities, tmp_path: Path) -> None:
    async with http_port(tmp_path, authorities) as port:
        pages = ("/console/", "/console/topics", "/console/topics/t", "/console/events", "/metrics")
        messages, change = "/console/topics/t/messages", "/console/topics/t/delete"
        for path in (*pages, messages, change):
            assert await port.status(path) == 401, path
            assert await port.status(path, "alice", "wrong") == 401, path
            assert await port.status(path, "stranger") == 401, path
            assert await port.status(path, "alice") == 403, path
            assert await port.status(path, ssl=port.operator) == 200, path
        await port.change(AlterAcls(add=ALL))
        assert [await port.status(path, "alice") for path in pages] == [200] * len(pages)
        assert (await port.status(messages, "alice"), await port.status(messages, "root")) == (403, 200)
        assert (await port.status(change, "alice"), await port.status(change, "root")) == (403, 200)
        await port.change(AlterAcls(add=(acl("t", resource=Resource.TOPIC),)))
        assert await port.status(messages, "alice") == 200
        await port.change(AlterAcls(add=(HIDDEN,)))  # the pages of all topics would show it
        assert {await port.status(path, "alice") for path in (*pages, messages)} == {403}
        assert (await port.status("/readyz"), await port.status("/healthz")) == (200, 200)
        for header in ("Basic", "Basic ?", "Basic YWxpY2U=", "Bearer YWxpY2U6cGVuY2ls", "Basic " + "A" * 9_000):
            assert await port.status("/console/", headers={"Authorization": header}) in (400, 401)
    text = (tmp_path / "data" / "audit.jsonl").read_text()
    noted = [json.loads(line) for line in text.splitlines()]
    found = {(line["user"], line["port"], line["act"], line["result"]) for line in noted}
    assert found >= {("", "http", "Login", "refused"), ("alice", "http", "GET /console/topics/{topic}", "refused")}
    assert "pencil" not in text


async def test_a_cookie_spares_the_password_and_a_change_needs_it(authorities: Authorities, tmp_path: Path) -> None:
    change, form = "/console/topics/t/delete", {"change": "{}", "token": "x", "name": "t"}
    async with http_port(tmp_path, authorities) as port, browser() as session:
        origin = {"Origin": port.base}
        assert await port.status(change, "root", data=form, headers=origin) == 403  # as another site's page would
        async with session.get(port.base + "/console/", headers=basic("root", "pencil"), ssl=port.stranger) as r:
            (cookie,) = r.headers.getall("Set-Cookie")
        assert cookie.startswith(f"{COOKIE}=")
        assert all(word in cookie for word in ("Secure", "HttpOnly", "SameSite=Strict", "Path=/"))
        assert "Domain" not in cookie
        assert await port.status("/console/", session=session) == 200
        assert await port.status(change, session=session, data=form, headers={"Origin": "https://evil"}) == 403
        assert await port.status(change, session=session, data=form, headers=origin) == 403  # the token is forged
        await port.change(DeleteUser(name="root"))
        assert await port.status("/console/", session=session) == 401


async def test_a_page_that_follows_a_topic_ends_with_its_user(authorities: Authorities, tmp_path: Path) -> None:
    async with http_port(tmp_path, authorities) as port, browser() as session:
        url, headers = f"{port.base}/console/topics/t/messages?tail=on", basic("root", "pencil")
        async with session.get(url, headers=headers, ssl=port.stranger) as response:
            assert response.status == 200
            await port.change(DeleteUser(name="root"))
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
