"""Three Kafka clients log in by every mechanism, with and without TLS, and are refused with a wrong password."""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import KafkaException, Producer, admin
from kafka import KafkaAdminClient
from kafka.errors import KafkaError as PythonError

from smq.coordinator.config.node_toml import SASL_MECHANISMS, ListenerConfig
from smq.coordinator.kafka.sasl import Login
from tests.unit.coordinator.kafka.test_logins import ANY, Port, with_port
from tests.unit.coordinator.service.test_tokens import ISSUER_KEYS, STRANGER, Issuer, config
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of

__all__ = ("authorities",)  # a fixture
Clients = Callable[[str, str, str, str, Path], None]


def by_confluent(address: str, protocol: str, mechanism: str, password: str, ca: Path) -> None:
    failures: list[Any] = []
    config = {
        "bootstrap.servers": address,
        "security.protocol": protocol,
        "sasl.mechanism": mechanism,
        "sasl.username": "alice",
        "sasl.password": password,
        "ssl.ca.location": str(ca) if protocol == "SASL_SSL" else None,
        "error_cb": failures.append,
    }
    producer = Producer({key: value for key, value in config.items() if value is not None})
    producer.produce("t", b"by confluent", on_delivery=lambda error, _: failures.append(error) if error else None)
    for _ in range(60):
        if not producer.flush(0.5) or failures:
            break
    if failures:
        raise PermissionError(failures[0])


def by_aiokafka(address: str, protocol: str, mechanism: str, password: str, ca: Path) -> None:
    async def produce() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=address,
            security_protocol=protocol,
            sasl_mechanism=mechanism,
            sasl_plain_username="alice",
            sasl_plain_password=password,
            ssl_context=ssl.create_default_context(cafile=str(ca)) if protocol == "SASL_SSL" else None,
        )
        await producer.start()
        try:
            await producer.send_and_wait("t", b"by aiokafka")
        finally:
            await producer.stop()

    try:
        asyncio.run(produce())
    except AiokafkaError as e:
        raise PermissionError(e) from e


def by_kafka_python(address: str, protocol: str, mechanism: str, password: str, ca: Path) -> None:
    try:
        admin = KafkaAdminClient(
            bootstrap_servers=address,
            security_protocol=protocol,
            sasl_mechanism=mechanism,
            sasl_plain_username="alice",
            sasl_plain_password=password,
            ssl_cafile=str(ca) if protocol == "SASL_SSL" else None,
        )
        try:
            assert "t" in admin.list_topics()
        finally:
            admin.close()
    except PythonError as e:
        raise PermissionError(e) from e


@pytest.mark.parametrize("client", [by_confluent, by_aiokafka, by_kafka_python])
def test_a_client_gets_in_by_each_mechanism_and_not_with_a_wrong_password(
    authorities: Authorities, tmp_path: Path, client: Clients
) -> None:
    ca = authorities.ours / "ca" / "ca.crt"
    by_password = SASL_MECHANISMS[:-1]
    scram = by_password[:-1]
    listeners = {
        "inside": ListenerConfig(name="inside", kafka_address=ANY, tls=False, sasl=scram),
        "outside": ListenerConfig(name="outside", kafka_address=ANY, sasl=by_password),
    }

    def scenario(port: Port) -> None:
        for listener, protocol, mechanisms in (
            ("inside", "SASL_PLAINTEXT", scram),
            ("outside", "SASL_SSL", by_password),
        ):
            address = port.address(listener)
            for mechanism in mechanisms:
                client(address, protocol, mechanism, "pencil", ca)
            with pytest.raises(PermissionError):
                client(address, protocol, mechanisms[-1], "wrong", ca)

    with_port(tmp_path, scenario, tls=config_of(authorities.node(1)), kafka_address=None, listeners=listeners)


def test_kafkas_tools_manage_users_who_then_log_in(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        def connect(name: str, password: str) -> Any:  # the stubs of confluent_kafka lack users
            return admin.AdminClient(
                {
                    "bootstrap.servers": port.address("outside"),
                    "security.protocol": "SASL_PLAINTEXT",
                    "sasl.mechanism": "SCRAM-SHA-256",
                    "sasl.username": name,
                    "sasl.password": password,
                }
            )

        tools: Any = admin
        sha_256 = tools.ScramMechanism.SCRAM_SHA_256
        alice = connect("alice", "pencil")
        info = tools.ScramCredentialInfo(sha_256, 4_096)
        made = alice.alter_user_scram_credentials([tools.UserScramCredentialUpsertion("bob", info, b"bobs", b"salt")])
        made["bob"].result(30)
        bob = connect("bob", "bobs")
        found = alice.describe_user_scram_credentials(["bob"])["bob"].result(30)
        assert [(i.mechanism, i.iterations) for i in found.scram_credential_infos] == [(sha_256, 4_096)]
        gone = alice.alter_user_scram_credentials([tools.UserScramCredentialDeletion("bob", sha_256)])
        gone["bob"].result(30)
        with pytest.raises(KafkaException):
            bob.list_topics(timeout=3)

    with_port(tmp_path, scenario)


def test_librdkafka_shows_another_token_before_the_last_one_ends(
    authorities: Authorities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its callback, on the same connection (KIP-368). It hears why a token is refused."""
    jwks = tmp_path / "jwks.json"
    ISSUER_KEYS.write(jwks)
    sessions: list[Login] = []
    begin = Login._begin_session

    def counted(login: Login, proven: Any, now_s: float) -> int:
        sessions.append(login)
        return begin(login, proven, now_s)

    monkeypatch.setattr(Login, "_begin_session", counted)

    def scenario(port: Port) -> None:
        def produce(issuer: Issuer, lifetime_s: float, seconds: float) -> tuple[list[Any], list[Any]]:
            """What became of a stream of records, and the errors of the connections."""

            def token(_: str) -> tuple[str, float]:
                now = time.time()
                return issuer.token(now=now, exp=now + lifetime_s), now + abs(lifetime_s)

            failures: list[Any] = []
            outcomes: list[Any] = []
            producer = Producer(
                {
                    "bootstrap.servers": port.address("outside"),
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanism": "OAUTHBEARER",
                    "ssl.ca.location": str(authorities.ours / "ca" / "ca.crt"),
                    "oauth_cb": token,
                    "error_cb": failures.append,
                }
            )
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                producer.produce("t", b"x", on_delivery=lambda error, _: outcomes.append(error))
                producer.flush(0.5)
            return outcomes, failures

        for issuer, lifetime_s, reason in (
            (ISSUER_KEYS, -60, "the token has expired"),
            (STRANGER, 60, "the token's signature is wrong"),
        ):
            outcomes, failures = produce(issuer, lifetime_s, 2)
            assert None not in outcomes
            assert any(reason in str(failure) for failure in failures), failures
        outcomes, failures = produce(ISSUER_KEYS, 10, 13)
        assert (set(outcomes), failures) == ({None}, [])
        assert max(Counter(sessions).values()) > 1

    tls, oauth = config_of(authorities.node(1)), config(str(jwks), clock_skew_ms=0)
    outside = ListenerConfig(name="outside", kafka_address=ANY, sasl=("OAUTHBEARER",))
    with_port(tmp_path, scenario, tls=tls, oauth=oauth, listeners={"outside": outside})
