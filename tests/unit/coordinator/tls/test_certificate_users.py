"""The user of a client's certificate: Kafka's rules, and what that user may do on each port."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smq.clients import Admin
from smq.clients import Tls as ClientFiles
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.certificate_users import CertificateUsers, NoUser
from smq.coordinator.config.node_toml import TlsConfig
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.tls.certificate_files import Identity
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.commands import AlterAcls
from smq.raft_state.errors import AuthenticationFailed, NotAuthorized
from smq.raft_state.handlers.acls import Operation
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.served import Served, serving
from tests.unit.coordinator.tls.authorities import Authorities, authorities, dialling
from tests.unit.raft_state.support import acl

__all__ = ("authorities",)  # a fixture


@pytest.mark.parametrize(
    ("rules", "name", "user"),
    [
        (["DEFAULT"], "CN=alice,O=x", "CN=alice,O=x"),
        (["RULE:^CN=(.*?),.*$/$1/L", "DEFAULT"], "CN=Alice,O=x", "alice"),
        (["RULE:^CN=(.*?),.*$/$1/", "DEFAULT"], "CN=Alice", "CN=Alice"),
        (["RULE:CN=(\\w+),OU=(\\w+).*/$2-$1/U"], "CN=a,OU=b,C=c", "B-A"),
        (["RULE:CN=([^,\\/]*)\\/.*/\\/$1/"], "CN=a/b", "/a"),
        (["RULE:CN=alice/admin/"], "CN=alice", "admin"),
        (["RULE:CN=alice/admin/"], "CN=alice2", None),
        (["RULE:CN=alice/admin/"], "OU=x,CN=alice", None),
        (["RULE:CN=alice/admin/"], "CN=alice\n", None),
        (["RULE:CN=([^,]*),O=x/$1/"], "CN=admin\\,O=x,O=evil", None),
        (["RULE:CN=(.*)/$1/"], "CN=*", None),
        (["RULE:CN=(.*)/$1/"], "CN=", None),
        (["DEFAULT"], "", None),
        ([], "CN=alice", None),
    ],
)
def test_the_first_rule_that_matches_the_whole_name_gives_the_user(
    rules: list[str], name: str, user: str | None
) -> None:
    users = CertificateUsers(rules)
    if user is None:
        with pytest.raises(NoUser):
            users.user_named(name)
    else:
        assert users.user_named(name) == user


@pytest.mark.parametrize("rule", ["", "alice", "RULE:x", "RULE:x/y/Z", "RULE:(/y/", "RULE:(x)/$2/", "default"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(ConfigError):
        CertificateUsers(["DEFAULT", rule])


def test_a_certificate_has_its_users_rights_on_every_port(authorities: Authorities, tmp_path: Path) -> None:
    """admin is a super user, alice may read t, and no rule matches the name of a node."""
    rules = ("RULE:CN=([a-z]+)/$1/",)
    node = authorities.node(1)
    files: Any = {"ca": node.ca, "certificate": node.certificate, "key": node.key}
    tls = TlsConfig(**files, certificate_users=rules)

    async def body(served: Served) -> None:
        server = served.server
        kafka = format_address(server.kafka_address) if server.kafka_address is not None else ""

        def files_of(identity: Identity) -> ClientFiles:
            return ClientFiles(ca=identity.ca, certificate=identity.certificate, key=identity.key)

        async def create(identity: Identity, topic: str) -> None:
            async with Admin(format_address(server.grpc_address), tls=files_of(identity)) as admin:
                await admin.create_topic(topic)

        def over_kafka(identity: Identity) -> RawKafka:
            raw = RawKafka(kafka)
            raw.socket = dialling(identity).wrap_socket(raw.socket)
            return raw

        async def over_http(identity: Identity, path: str) -> int:
            url = f"https://{format_address(server.http_address)}{path}"
            async with aiohttp.ClientSession() as session, session.get(url, ssl=dialling(identity)) as response:
                return response.status

        def read_alone() -> None:
            raw = over_kafka(authorities.client("alice"))
            assert [t["name"] for t in raw.call(ApiKey.METADATA, 12, topics=None)["topics"]] == ["t"]
            assert raw.fetch("t", 0)["error_code"] == KafkaError.NONE
            assert raw.produce("t", batch(b"x"))["error_code"] == KafkaError.TOPIC_AUTHORIZATION_FAILED
            assert over_kafka(authorities.client("admin")).produce("t", batch(b"x"))["error_code"] == KafkaError.NONE
            other = over_kafka(authorities.client("eve"))
            assert other.call(ApiKey.METADATA, 12, topics=None)["topics"] == []
            nobody = over_kafka(node)
            nobody.send(ApiKey.METADATA, 12, topics=None)
            assert nobody.is_closed_by_node()

        for topic in ("t", "hidden"):
            await create(authorities.client("admin"), topic)
        with pytest.raises(NotAuthorized):
            await create(authorities.client("alice"), "mine")
        with pytest.raises(AuthenticationFailed):
            await create(node, "mine")
        done = asyncio.Event()
        server.node.propose(AlterAcls(add=(acl("t", Operation.READ),)), 5_000, lambda _: done.set())
        await done.wait()
        await asyncio.to_thread(read_alone)
        for path in ("/console", "/metrics"):
            seen = [await over_http(authorities.client(name), path) for name in ("alice", "admin")]
            assert seen[0] == 403, path
            assert seen[1] != 403, path
        assert set(server.node.state.topics) == {"t", "hidden"}

    serving(tmp_path, body, tls=tls, kafka_address=("127.0.0.1", 0), super_users=("admin",))
