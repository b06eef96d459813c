"""The exchanges of SASL: RFC 7677's example, and what tries to get in without the password."""

import asyncio
import dataclasses
import functools
import json
import secrets
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smq.clients import scram
from smq.clients.scram import BY_NAME, Mechanism
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.sasl import Login, PlainExchange, SaslMisuse
from smq.coordinator.limits import PASSWORD_CHECKS_WAITING_MAX, SASL_TOKEN_BYTES_MAX
from smq.coordinator.service.scram_exchange import LoginFailed, ScramExchange
from smq.coordinator.service.tokens import Tokens
from smq.coordinator.service.users import ANY, Identity, Users
from smq.raft_state.commands import ScramCredential
from smq.raft_state.state import ClusterState, UserState
from tests.unit.clients.test_scram import (
    CLIENT_FIRST,
    NONCE,
    PROOF,
    SERVER_FIRST,
    SERVER_SIGNATURE,
    WITHOUT_PROOF,
)
from tests.unit.coordinator.service.test_tokens import ISSUER_KEYS, NOW, config

SHA_256, SHA_512 = BY_NAME["SCRAM-SHA-256"], BY_NAME["SCRAM-SHA-512"]
ALL = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN", "OAUTHBEARER")


def credential(password: str, mechanism: Mechanism = SHA_256, salt: bytes = b"salt of a test") -> ScramCredential:
    keys = scram.keys_of(mechanism, scram.salted(mechanism, password.encode(), salt, 4_096), salt, 4_096)
    return ScramCredential(
        mechanism=mechanism.number,
        iterations=4_096,
        salt=salt,
        stored_key=keys.stored_key,
        server_key=keys.server_key,
    )


@functools.cache
def tokens() -> Tokens:
    """Those of the issuer of `test_tokens`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "jwks.json"
        ISSUER_KEYS.write(path)
        return Tokens(config(str(path)), now=lambda: NOW)


class World:
    """A node's state, with the users user (pencil) and bob (secret, by SHA-512 alone)."""

    def __init__(self) -> None:
        rfc_salt = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
        self.state = ClusterState(decoy_secret=b"d" * 32)
        self.set("user", credential("pencil", salt=rfc_salt))
        self.set("bob", credential("secret", SHA_512))
        self.users = Users(lambda: self.state)
        self.tokens = tokens()

    def set(self, name: str, *credentials: ScramCredential) -> None:
        others = {other: user for other, user in self.state.users.items() if other != name}
        new = {name: UserState(name=name, credentials=credentials)} if credentials else {}
        self.state.users = MappingProxyType(others | new)

    def login(self, session_ms_max: int = 0) -> Login:
        return Login(self.users, ALL, session_ms_max, self.tokens)


def without_passwords() -> World:
    """With random passwords, which no generator tries."""
    made = World()
    for name in ("user", "bob"):
        made.set(name, credential(secrets.token_hex(16)))
    return made


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.users.close()


def run(scenario: Any) -> Any:
    return asyncio.run(scenario)


def final_message(mechanism: Mechanism, password: str, first: bytes, server_first: bytes) -> bytes:
    """A client's, for the password; the header of `first` is b"n,,"."""
    fields = dict(part.split(b"=", 1) for part in server_first.split(b","))
    salted = scram.salted(mechanism, password.encode(), b64decode(fields[b"s"]), int(fields[b"i"]))
    without_proof = b"c=biws,r=" + fields[b"r"]
    said = first.removeprefix(b"n,,") + b"," + server_first + b"," + without_proof
    key = scram.client_key(mechanism, salted)
    signature = scram.keyed(mechanism, scram.hashed(mechanism, key), said)
    proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
    return without_proof + b",p=" + b64encode(proof)


async def log_in(login: Login, name: str, password: str, mechanism: Mechanism = SHA_256) -> Struct:
    """The last answer of the whole exchange."""
    login.handshake({"mechanism": mechanism.name})
    first = f"n,,n={name},r=abc".encode()
    answer = await login.authenticate({"auth_bytes": first}, 0)
    final = final_message(mechanism, password, first, answer["auth_bytes"])
    return await login.authenticate({"auth_bytes": final}, 0)


def is_open(login: Login) -> bool:
    return login.is_open


def is_proven(exchange: ScramExchange) -> bool:
    """A function, so that a type checker takes it for another value each time."""
    return exchange.proven is not None


def code_of(answer: Struct) -> KafkaError:
    return KafkaError(answer["error_code"])


# ------------------------------------------------------------------------------------------------------ SCRAM
def test_the_exchange_is_that_of_the_rfc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "smq.coordinator.service.scram_exchange.secrets.token_urlsafe",
        lambda _: NONCE.removeprefix("rOprNGfwEbeRWgbNEkqO"),
    )
    exchange = ScramExchange(world.users, SHA_256)

    async def scenario() -> None:
        assert await exchange.step(f"n,,{CLIENT_FIRST}".encode()) == SERVER_FIRST.encode()
        assert not is_proven(exchange)
        assert await exchange.step(f"{WITHOUT_PROOF},p={PROOF}".encode()) == f"v={SERVER_SIGNATURE}".encode()
        assert exchange.proven is not None
        assert exchange.proven.user == "user"

    run(scenario())


@pytest.mark.parametrize(("name", "password", "mechanism"), [("user", "pencil", SHA_256), ("bob", "secret", SHA_512)])
def test_a_user_with_its_password_gets_in(world: World, name: str, password: str, mechanism: Mechanism) -> None:
    login = world.login()
    assert code_of(run(log_in(login, name, password, mechanism))) is KafkaError.NONE
    assert (login.is_open, login.has_failed) == (True, False)
    assert login.identity is not None
    assert login.identity.user == name


def test_a_wrong_password_and_an_unknown_user_look_the_same(world: World) -> None:
    logins = [world.login() for _ in range(4)]
    answers = [
        run(log_in(login, name, "wrong", mechanism))
        for login, name, mechanism in zip(
            logins, ("user", "stranger", "user", "bob"), (SHA_256, SHA_256, SHA_512, SHA_256), strict=True
        )
    ]
    assert [code_of(answer) for answer in answers] == [KafkaError.SASL_AUTHENTICATION_FAILED] * 4
    assert answers[0] == answers[1]
    assert answers[0] == answers[3]
    assert all(login.has_failed and login.identity is None for login in logins)


def test_what_is_shown_of_an_unknown_user_is_always_the_same_on_every_node(world: World) -> None:
    other = World()
    for name in ("stranger", "visitor", "bob"):
        shown = [users.find(name, SHA_256.number).credential for users in (world.users, world.users, other.users)]
        assert len({(c.salt, c.iterations, c.mechanism) for c in shown}) == 1
        assert len({c.stored_key for c in shown}) == 3
        assert not any(world.users.holds(Identity(name, c)) for c in shown)
    first, second = (world.users.find(name, ANY).credential for name in ("stranger", "visitor"))
    assert first.salt != second.salt
    other.state.decoy_secret = b"e" * 32
    assert other.users.find("stranger", ANY).credential.salt != first.salt


def test_unknown_users_look_like_the_known_ones_do(world: World) -> None:
    for number in range(90):
        iterations = 4_096 if number < 30 else 16_384
        made = dataclasses.replace(credential("x", salt=b"s" * 32), iterations=iterations)
        world.set(f"u{number}", made)
    world.set("user")
    found = [world.users.find(f"stranger {number}", SHA_256.number).credential for number in range(900)]
    assert {len(c.salt) for c in found} == {32}
    assert 200 < sum(c.iterations == 4_096 for c in found) < 400
    before = {c.salt for c in found}
    world.set("u0")
    after = {world.users.find(f"stranger {number}", SHA_256.number).credential.salt for number in range(900)}
    assert before == after


def bearer(token: str) -> bytes:
    return b"n,,\1auth=Bearer " + token.encode() + b"\1\1"


MALFORMED = [
    b"",
    b"n",
    b"n,,n=user",
    b"n,,n=,r=x",
    b"n,,n=user,r=",
    b"n,,r=x,n=user",
    b"n,,n=user,r=x\n",
    b"n,,n=us=3er,r=x",
    b"n,,n=user=2c,r=x",
    b"n,,m=ext,n=user,r=x",
    b"n,,n=us\0er,r=x",
    b"n,,n=\xff,r=x",
    b"p=tls-unique,,n=user,r=x",
    b"x,,n=user,r=x",
    b"n,a=bob,n=user,r=x",
    b"n,user,n=user,r=x",
    b"\0user\0pencil",
]


@pytest.mark.parametrize("token", MALFORMED)
def test_a_malformed_first_message_ends_the_login(world: World, token: bytes) -> None:
    with pytest.raises(LoginFailed):
        run(ScramExchange(world.users, SHA_256).step(token))


@pytest.mark.parametrize(
    "first", [b"n,,n=us=2Cer=3D,r=x", b"y,,n=us=2Cer=3D,r=x,tokenauth=true", b"n,a=us=2Cer=3D,n=us=2Cer=3D,r=x"]
)
def test_names_are_unescaped_and_extensions_signed(world: World, first: bytes) -> None:
    world.set("us,er=", credential("pencil"))
    gs2 = first[: first.index(b"n=us", 2)]
    exchange = ScramExchange(world.users, SHA_256)

    async def scenario() -> None:
        server_first = await exchange.step(first)
        final = final_message(SHA_256, "pencil", b"n,," + first.removeprefix(gs2), server_first)
        if gs2 != b"n,,":  # the header is signed, too
            with pytest.raises(LoginFailed, match="the header"):
                await exchange.step(final)
            return
        await exchange.step(final)
        assert exchange.proven is not None

    run(scenario())


def changed(final: bytes, **fields: bytes) -> bytes:
    """With other values of c, r or p."""
    parts = dict(part.split(b"=", 1) for part in final.split(b","))
    return b",".join(key + b"=" + fields.get(key.decode(), value) for key, value in parts.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda final, _: b"",
        lambda final, _: changed(final, p=b""),
        lambda final, _: changed(final, p=b64encode(bytes(32))),
        lambda final, _: changed(final, p=b64encode(bytes(31))),
        lambda final, _: changed(final, p=b64encode(bytes(64))),
        lambda final, _: changed(final, p=b"=" * 44),
        lambda final, _: changed(final, c=b"eSws"),
        lambda final, _: changed(final, c=b"="),
        lambda final, _: changed(final, r=b"abc"),
        lambda final, server: changed(final, r=b"x" + dict(p.split(b"=", 1) for p in server.split(b","))[b"r"]),
        lambda final, _: final + b",x=y",
        lambda final, server: server,
        lambda final, _: b"v=" + final.rpartition(b"p=")[2],
        lambda final, _: b"e=other-error",
    ],
)
def test_a_final_message_that_is_changed_or_reflected_proves_nothing(
    world: World, change: Callable[[bytes, bytes], bytes]
) -> None:
    exchange, first = ScramExchange(world.users, SHA_256), b"n,,n=user,r=abc"

    async def scenario() -> None:
        server_first = await exchange.step(first)
        token = change(final_message(SHA_256, "pencil", first, server_first), server_first)
        with pytest.raises(LoginFailed):
            await exchange.step(token)
        assert exchange.proven is None

    run(scenario())


def test_a_recorded_login_does_not_serve_again(world: World) -> None:
    async def scenario() -> None:
        recorded, first = ScramExchange(world.users, SHA_256), b"n,,n=user,r=abc"
        final = final_message(SHA_256, "pencil", first, await recorded.step(first))
        await recorded.step(final)
        replayed = ScramExchange(world.users, SHA_256)
        await replayed.step(first)
        with pytest.raises(LoginFailed, match="nonce"):
            await replayed.step(final)

    run(scenario())


def test_a_password_that_changes_during_the_exchange_does_not_let_in(world: World) -> None:
    async def scenario() -> None:
        for other in ((), (credential("other"),)):
            world.set("user", credential("pencil"))
            exchange, first = ScramExchange(world.users, SHA_256), b"n,,n=user,r=abc"
            final = final_message(SHA_256, "pencil", first, await exchange.step(first))
            world.set("user", *other)
            with pytest.raises(LoginFailed):
                await exchange.step(final)

    run(scenario())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from([*MALFORMED[:-1], b"n,,n=user,r=abc", b"\0user\0wrong", bearer("e30.e30.e30"), b"\1"]),
        ),
        max_size=4,
    )
)
def test_no_bytes_get_in_or_raise_anything_else(tokens: list[bytes]) -> None:
    world = without_passwords()
    for mechanism in ALL:
        login = world.login()
        login.handshake({"mechanism": mechanism})

        async def scenario(login: Login = login) -> None:
            for token in tokens:
                answer = await login.authenticate({"auth_bytes": token}, 0)
                if code_of(answer) is not KafkaError.NONE:
                    return

        run(scenario())
        assert login.identity is None
        assert not login.is_open
    world.users.close()


# ------------------------------------------------------------------------------------------------------ PLAIN
@pytest.mark.parametrize(
    ("token", "is_in"),
    [
        (b"\0user\0pencil", True),
        (b"user\0user\0pencil", True),
        (b"\0bob\0secret", True),
        (b"bob\0user\0pencil", False),
        (b"\0user\0wrong", False),
        (b"\0stranger\0pencil", False),
        (b"\0user\0", False),
        (b"\0\0pencil", False),
        (b"user\0pencil", False),
        (b"\0user\0pencil\0", False),
        (b"\0us\xffer\0pencil", False),
        (b"", False),
    ],
)
def test_plain_lets_in_by_the_password_alone(world: World, token: bytes, is_in: bool) -> None:
    async def scenario() -> None:
        login = world.login()
        login.handshake({"mechanism": "PLAIN"})
        answer = await login.authenticate({"auth_bytes": token}, 0)
        assert (code_of(answer) is KafkaError.NONE, login.is_open) == (is_in, is_in)
        assert (
            is_in
            or answer["error_message"] == "authentication with PLAIN failed: check the user's name and its password"
        )
        assert b"pencil".decode() not in login.take_failure()

    run(scenario())


def test_an_unknown_users_password_costs_the_node_as_much(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[int] = []
    salted = scram.salted

    def counted(mechanism: Mechanism, password: bytes, salt: bytes, iterations: int) -> bytes:
        costs.append(mechanism.key_bytes * iterations)
        return salted(mechanism, password, salt, iterations)

    monkeypatch.setattr("smq.coordinator.service.users.scram.salted", counted)
    world.set("bob")

    async def scenario() -> None:
        for name in ("user", "stranger"):
            assert await world.users.check_password(name, b"wrong") is None

    run(scenario())
    assert costs[0] == costs[1]


def test_a_node_that_checks_too_many_passwords_gives_no_verdict(world: World) -> None:
    async def scenario() -> None:
        checks = [
            asyncio.ensure_future(world.users.check_password("user", b"x")) for _ in range(PASSWORD_CHECKS_WAITING_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(SaslMisuse, match="too many"):
            await PlainExchange(world.users).step(b"\0user\0pencil")
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        assert await world.users.check_password("user", b"pencil") is not None

    run(scenario())


# ------------------------------------------------------------------------------------------------- OAUTHBEARER
@pytest.mark.parametrize(
    ("header", "rest", "is_in"),
    [
        (b"n,,", b"", True),
        (b"y,a=alice,", b"port=9092\1logicalCluster=x\1", True),
        (b"n,a=eve,", b"", False),
        (b"p=x,,", b"", False),
        (b"n,a=al\1ice,", b"", False),
        (b"n,,", b"auth=Bearer x\1", False),
        (b"n,,", b"=x\1", False),
        (b"n,,", b"\1", False),
    ],
)
def test_a_token_lets_its_user_in_in_a_message_of_the_rfc(
    world: World, header: bytes, rest: bytes, is_in: bool
) -> None:
    async def scenario() -> None:
        login = world.login()
        login.handshake({"mechanism": "OAUTHBEARER"})
        token = ISSUER_KEYS.token().encode()
        answer = await login.authenticate({"auth_bytes": header + b"\1auth=bearer  " + token + b"\1" + rest + b"\1"}, 0)
        assert (login.is_open, not login.take_failure()) == (is_in, is_in)
        if is_in:
            assert (answer["auth_bytes"], answer["session_lifetime_ms"]) == (b"", 300_000)

    run(scenario())


@pytest.mark.parametrize("acknowledged", [b"\1", bearer(ISSUER_KEYS.token())])
def test_a_token_that_is_refused_gets_the_reason_and_no_second_chance(world: World, acknowledged: bytes) -> None:
    async def scenario() -> None:
        login = world.login()
        login.handshake({"mechanism": "OAUTHBEARER"})
        told = await login.authenticate({"auth_bytes": bearer(ISSUER_KEYS.token(exp=NOW - 60))}, 0)
        assert code_of(told) is KafkaError.NONE
        reason = {"status": "invalid_token", "error_description": "the token has expired"}
        assert json.loads(told["auth_bytes"]) == reason
        assert "the node's clock" in login.take_failure()
        answer = await login.authenticate({"auth_bytes": acknowledged}, 0)
        assert code_of(answer) is KafkaError.SASL_AUTHENTICATION_FAILED
        assert answer["error_message"] == "authentication with OAUTHBEARER failed: the token has expired"
        assert (login.has_failed, login.take_failure(), login.identity) == (True, "", None)

    run(scenario())


def test_a_session_ends_with_its_token_and_goes_on_with_another_of_the_same_user(world: World) -> None:
    async def again(login: Login, token: str, now_s: float) -> Struct:
        login.handshake({"mechanism": "OAUTHBEARER"})
        return await login.authenticate({"auth_bytes": bearer(token)}, now_s)

    async def scenario() -> None:
        login = world.login(session_ms_max=600_000)
        assert (await again(login, ISSUER_KEYS.token(), 1_000))["session_lifetime_ms"] == 300_000
        login.check_session(1_329)
        with pytest.raises(SaslMisuse, match="the session has ended"):
            login.check_session(1_330)  # with the skew of the clocks
        assert (await again(login, ISSUER_KEYS.token(exp=NOW + 9_000), 1_330))["session_lifetime_ms"] == 600_000
        with pytest.raises(SaslMisuse, match="the session has ended"):
            login.check_session(1_930)
        assert (await again(login, ISSUER_KEYS.token(exp=NOW - 5), 2_000))["session_lifetime_ms"] == 1
        answer = await again(login, ISSUER_KEYS.token(sub="eve"), 2_001)
        assert code_of(answer) is KafkaError.SASL_AUTHENTICATION_FAILED
        assert login.has_failed

    run(scenario())


# ------------------------------------------------------------------------------------------------- the connection
def test_requests_out_of_turn_end_the_connection(world: World) -> None:
    async def scenario() -> None:
        with pytest.raises(SaslMisuse, match="before a handshake"):
            await world.login().authenticate({"auth_bytes": b"n,,n=user,r=abc"}, 0)
        login = world.login()
        login.handshake({"mechanism": "PLAIN"})
        with pytest.raises(SaslMisuse, match="inside another"):
            login.handshake({"mechanism": "PLAIN"})
        failed = world.login()
        await log_in(failed, "user", "wrong")
        with pytest.raises(SaslMisuse):
            await failed.authenticate({"auth_bytes": b""}, 0)
        with pytest.raises(SaslMisuse):
            failed.handshake({"mechanism": "PLAIN"})

    run(scenario())


def test_a_mechanism_that_is_not_served_is_refused_with_the_list(world: World) -> None:
    for mechanism in ("GSSAPI", "PLAIN", "scram-sha-256", ""):
        login = Login(world.users, ("SCRAM-SHA-256",), 0)
        answer = login.handshake({"mechanism": mechanism})
        assert answer == {"error_code": KafkaError.UNSUPPORTED_SASL_MECHANISM, "mechanisms": ["SCRAM-SHA-256"]}
        assert login.has_failed


def test_a_token_that_is_too_large_fails(world: World) -> None:
    login = world.login()
    login.handshake({"mechanism": "SCRAM-SHA-256"})
    token = b"n,,n=user,r=" + b"a" * SASL_TOKEN_BYTES_MAX
    assert code_of(run(login.authenticate({"auth_bytes": token}, 0))) is KafkaError.SASL_AUTHENTICATION_FAILED


def test_a_user_proves_itself_again_as_the_same_user_by_the_same_mechanism(world: World) -> None:
    async def scenario() -> None:
        world.set("user", credential("pencil"), credential("pencil", SHA_512))
        world.set("eve", credential("secret"))
        login = world.login(session_ms_max=1_000)
        answer = await log_in(login, "user", "pencil")
        assert answer["session_lifetime_ms"] == 1_000
        login.check_session(0.9)
        with pytest.raises(SaslMisuse, match="the session has ended"):
            login.check_session(1.0)
        login.handshake({"mechanism": "SCRAM-SHA-256"})
        assert not is_open(login)  # nothing else is served meanwhile
        first = b"n,,n=user,r=abc"
        server_first = (await login.authenticate({"auth_bytes": first}, 5))["auth_bytes"]
        await login.authenticate({"auth_bytes": final_message(SHA_256, "pencil", first, server_first)}, 5)
        assert is_open(login)
        login.check_session(5.9)
        assert code_of(login.handshake({"mechanism": "SCRAM-SHA-512"})) is KafkaError.UNSUPPORTED_SASL_MECHANISM
        assert login.has_failed
        other = world.login()
        await log_in(other, "user", "pencil")
        assert code_of(await log_in(other, "eve", "secret")) is KafkaError.SASL_AUTHENTICATION_FAILED
        assert other.has_failed

    run(scenario())


def test_a_login_is_valid_while_its_user_has_the_credential_that_let_it_in(world: World) -> None:
    async def scenario() -> None:
        world.set("user", credential("pencil"), credential("pencil", SHA_512))
        assert world.login().is_valid()
        login = world.login()
        await log_in(login, "user", "pencil")
        world.set("bob")
        assert login.is_valid()
        world.set("user", credential("pencil"), credential("new", SHA_512))
        assert login.is_valid()
        world.state = dataclasses.replace(world.state, users=dict(world.state.users))  # another snapshot
        assert login.is_valid()
        world.set("user", credential("pencil", salt=b"other"), credential("new", SHA_512))
        assert not login.is_valid()
        world.set("user", credential("pencil", SHA_512))
        assert not login.is_valid()
        world.set("user")
        assert not login.is_valid()

    run(scenario())
