"""A gRPC port that asks for users: what each rpc needs, which users get in, and how calls of revoked ones end."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from smq.clients import Admin
from smq.clients.login import Login, Token, read_password
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.clients.scram import BY_NAME, ClientExchange
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ListenerConfig
from smq.coordinator.grpc.authorization import RULES
from smq.coordinator.limits import LOGIN_FAILED_DELAY_S, LOGINS_PER_CONNECTION_MAX, USERS_CHECK_S
from smq.raft_state.commands import AlterAcls, AlterUser, Command, DeleteUser
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource
from smq.testing.served import PATIENCE_S, Served, fails, publish_request, served_node
from tests.unit.coordinator.kafka.test_logins import keys
from tests.unit.raft_state.support import acl

ANY = ("127.0.0.1", 0)
SOON_S = 1.0  # within which a revoked user's calls end
OUTSIDE = ListenerConfig(name="outside", grpc_address=ANY, sasl=("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"))
SERVICES = {name: kind.methods_by_name for name, kind in pb.DESCRIPTOR.services_by_name.items()}
METHODS = {method: service for service, methods in SERVICES.items() for method in methods}
REFUSED = {"LOGIN_NEEDED", "AUTHENTICATION_FAILED", "NOT_AUTHORIZED"}

Right = tuple[Operation, Resource, str]
READ, WRITE, SEE = Operation.READ, Operation.WRITE, Operation.DESCRIBE


def on(*operations: Operation, kind: Resource = Resource.TOPIC, name: str = "t") -> tuple[Right, ...]:
    return tuple((operation, kind, name) for operation in operations)


def group(operation: Operation, name: str = "g") -> tuple[Right, ...]:
    return on(operation, kind=Resource.GROUP, name=name)


def txn(operation: Operation) -> tuple[Right, ...]:
    return on(operation, kind=Resource.TRANSACTIONAL_ID, name="x")


def cluster(operation: Operation) -> tuple[Right, ...]:
    return on(operation, kind=Resource.CLUSTER, name=CLUSTER_NAME)


PART: dict[str, Any] = {"topic": "t", "partition": 0}
PARTS = [pb.TopicPartition(**PART)]
OFFSETS = [pb.PartitionOffset(**PART, offset=0)]
MEMBER = pb.GroupMember(member_id="m", generation=1)
PRODUCER: dict[str, Any] = {"transactional_id": "x", "producer_id": 1, "producer_epoch": 0}
STAGED = [pb.StagedTransaction(**PRODUCER)]
RULE = pb.Acl(resource="topic", pattern="literal", name="n", user="u", host="*", operation="read", permission="allow")

# What a request needs. Without one of its rights it is refused; with all of them it fails for other reasons, or works.
ROWS: dict[str, tuple[Any, tuple[Right, ...]]] = {
    "StartPublishSession": (pb.StartPublishSessionRequest(topic="t", session_id="s"), on(WRITE)),
    "PublishRecord": (publish_request([b"v"]), on(WRITE)),
    "MirrorRecord": (publish_request([b"v"]), on(WRITE, Operation.ALTER)),
    "SubscribeRecord": (
        pb.SubscribeRecordRequest(
            init=pb.SubscribeInit(**PART, subscription_id="s", offset_type=pb.RESUME_OR_EARLIEST, group="g")
        ),
        on(READ) + group(SEE),
    ),
    "Fetch": (pb.FetchRequest(partitions=[pb.FetchPartition(**PART, offset=0)]), on(READ)),
    "SearchRecords": (pb.SearchRecordsRequest(**PART, offset=0), on(READ)),
    "ListOffsets": (
        pb.ListOffsetsRequest(
            partitions=[pb.ListOffsetsPartition(**PART, offset_type=pb.EXACT_OFFSET, offset_value=0, group="g")]
        ),
        on(SEE) + group(SEE),
    ),
    "GetPartitionRangeInfo": (pb.GetPartitionRangeInfoRequest(**PART), on(SEE)),
    "CommitOffsets": (pb.CommitOffsetsRequest(group="kafka-cg-g", offsets=OFFSETS), on(READ) + group(READ)),
    "FetchOffsets": (pb.FetchOffsetsRequest(group="g", partitions=PARTS), on(SEE) + group(SEE)),
    "MeasureBacklogs": (pb.MeasureBacklogsRequest(offsets=OFFSETS), on(SEE)),
    "AssignOffsets": (pb.AssignOffsetsRequest(assignments=[pb.Assignment(**PART, count=1)]), on(WRITE)),
    "AdvanceHighWaterMark": (pb.AdvanceHighWaterMarkRequest(advances=[pb.Advance(**PART, offset=0)]), on(WRITE)),
    "JoinGroup": (pb.JoinGroupRequest(group="g", session_timeout_ms=1), group(READ)),
    "SyncGroup": (pb.SyncGroupRequest(group="g", member=MEMBER), group(READ)),
    "Heartbeat": (pb.HeartbeatRequest(group="g", member=MEMBER), group(READ)),
    "LeaveGroup": (pb.LeaveGroupRequest(group="g", member_id="m"), group(READ)),
    "StartProducer": (pb.StartProducerRequest(transactional_id="x", transaction_timeout_ms=1), txn(WRITE)),
    "AddToTransaction": (
        pb.AddToTransactionRequest(**PRODUCER, partitions=PARTS, groups=["g"]),
        txn(WRITE) + on(WRITE) + group(READ),
    ),
    "StageOffsets": (
        pb.StageOffsetsRequest(**PRODUCER, group="g", offsets=OFFSETS),
        txn(WRITE) + on(READ) + group(READ),
    ),
    "EndTransaction": (pb.EndTransactionRequest(**PRODUCER, commit=False), txn(WRITE)),
    "CommitBatch": (pb.CommitBatchRequest(batch_id=0, transactions=STAGED), txn(WRITE)),
    "CreateTopic": (pb.CreateTopicRequest(name="t", partition_count=1), on(Operation.CREATE)),
    "DeleteTopic": (pb.DeleteTopicRequest(name="gone"), on(Operation.DELETE, name="gone")),
    "AddPartitions": (pb.AddPartitionsRequest(name="t", partition_count=1), on(Operation.ALTER)),
    "AlterTopic": (pb.AlterTopicRequest(name="t", unset=["retention.ms"]), on(Operation.ALTER_CONFIGS)),
    "DeleteRecords": (pb.DeleteRecordsRequest(**PART, before_offset=0), on(Operation.DELETE)),
    "DescribeGroup": (pb.DescribeGroupRequest(group="g"), group(SEE)),
    "DeleteGroup": (pb.DeleteGroupRequest(group="g"), group(Operation.DELETE)),
    "DescribeTransaction": (pb.DescribeTransactionRequest(transactional_id="x"), txn(SEE)),
    "AbortTransaction": (pb.AbortTransactionRequest(transactional_id="x"), txn(WRITE)),
    "DeleteOffsets": (pb.DeleteOffsetsRequest(group="g", partitions=PARTS), group(Operation.DELETE) + on(READ)),
    "DescribeClusterConfig": (pb.DescribeClusterConfigRequest(), cluster(Operation.DESCRIBE_CONFIGS)),
    "AlterClusterConfig": (pb.AlterClusterConfigRequest(unset=["x"]), cluster(Operation.ALTER_CONFIGS)),
    "ListUsers": (pb.ListUsersRequest(), cluster(SEE)),
    "AlterUser": (pb.AlterUserRequest(name="x"), cluster(Operation.ALTER)),
    "DeleteUser": (pb.DeleteUserRequest(name="x"), cluster(Operation.ALTER)),
    "ListAcls": (pb.ListAclsRequest(), cluster(SEE)),
    "AlterAcls": (pb.AlterAclsRequest(remove=[RULE]), cluster(Operation.ALTER)),
    "TestAcl": (pb.TestAclRequest(user="bob", operation="read", resource="topic", name="t"), cluster(SEE)),
    "ListQuotas": (pb.ListQuotasRequest(), cluster(Operation.DESCRIBE_CONFIGS)),
    "AlterQuotas": (pb.AlterQuotasRequest(), cluster(Operation.ALTER_CONFIGS)),
    "NodeStatus": (pb.NodeStatusRequest(), cluster(SEE)),
    "DescribeCluster": (pb.DescribeClusterRequest(topics=["t"]), on(SEE)),
    "SetNodeDrained": (pb.SetNodeDrainedRequest(node=1, drained=False), cluster(Operation.ALTER)),
}
LISTS: dict[str, tuple[Any, str]] = {  # for every user, without what it may not see
    "DescribeCluster": (pb.DescribeClusterRequest(), "topics"),
    "ListGroups": (pb.ListGroupsRequest(), "groups"),
    "ListTransactions": (pb.ListTransactionsRequest(), "transactions"),
    "ListApps": (pb.ListAppsRequest(), "apps"),
}
FREE = {"Login", "ClosePublishSession"}


class Port:
    """The port of a node for users alice (pencil) and root (pencil), a super user."""

    def __init__(self, served: Served) -> None:
        self.served = served
        bound = served.server._grpc.bound["outside"]
        self.channel = grpc.aio.insecure_channel(format_address(bound))

    def stub(self, service: str) -> Any:
        return getattr(smq_pb2_grpc, f"{service}Stub")(self.channel)

    async def change(self, command: Command) -> None:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.served.server.node.propose(command, 5_000, done.set_result)
        reply = await done
        assert not isinstance(reply, SmqError), reply

    async def grant(self, rights: Iterable[Right]) -> None:
        """These rights for alice, and no others."""
        wanted = {acl(name, op, resource=kind) for op, kind, name in rights}
        now = set(self.served.server.node.state.acls)
        await self.change(AlterAcls(add=tuple(wanted - now), remove=tuple(now - wanted)))

    async def log_in(self, user: str = "alice", password: str = "pencil", **fields: Any) -> tuple[Any, ...]:
        token = Token(Login(user=user, password=password, **fields))
        await token.renew(self.stub("Users"))
        return token.metadata

    async def call(self, method: str, request: Any, metadata: Any) -> Any:
        """The first answer."""
        call = getattr(self.stub(METHODS[method]), method)
        async with asyncio.timeout(PATIENCE_S):
            if SERVICES[METHODS[method]][method].client_streaming:
                stream = call(None, metadata=metadata)
                await stream.write(request)
                answer = await stream.read()
                stream.cancel()
                return answer
            return await call(request, metadata=metadata)

    async def outcome(self, method: str, request: Any, metadata: Any) -> str:
        """The name of the error, or of that in the first answer of a stream."""
        try:
            answer = await self.call(method, request, metadata)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.INTERNAL:  # gRPC's own: the call was refused before its message had left
                return "CUT"
            return (await fails(_raised(e))).name
        answers = [answer, *getattr(answer, "assigned", ()), *getattr(answer, "advanced", ())]
        return next((one.error.name for one in answers if "error" in one.DESCRIPTOR.fields_by_name), "OK") or "OK"


async def _raised(error: Exception) -> None:
    raise error


@asynccontextmanager
async def users_port(tmp_path: Path, **config: Any) -> AsyncIterator[Port]:
    fields: dict[str, Any] = {"listeners": {"outside": OUTSIDE}, "super_users": ("root",)}
    async with served_node(tmp_path, **(fields | config)) as served:
        port = Port(served)
        for user in ("alice", "root"):
            await port.change(AlterUser(name=user, set_=keys("pencil"), decoy_secret=b"d" * 32))
        await served.create()
        yield port
        await port.channel.close(None)


def test_every_rpc_has_a_row() -> None:
    assert RULES.keys() == METHODS.keys()
    assert METHODS.keys() == ROWS.keys() | LISTS.keys() | FREE


async def test_each_rpc_needs_a_user_and_each_of_its_rights(tmp_path: Path) -> None:
    async with users_port(tmp_path) as port:
        alice, forged = await port.log_in(), (("authorization", f"Bearer {secrets.token_urlsafe(32)}"),)
        for method, (request, _) in (ROWS | {name: (asked, ()) for name, (asked, _) in LISTS.items()}).items():
            for metadata in ((), forged, (("authorization", "Basic YWxpY2U6cGVuY2ls"),), (("authorization", ""),)):
                assert await port.outcome(method, request, metadata) == "LOGIN_NEEDED", method
        for method, (request, rights) in ROWS.items():
            for missing in rights:
                await port.grant(right for right in rights if right != missing)
                assert await port.outcome(method, request, alice) == "NOT_AUTHORIZED", (method, missing)
            await port.grant(rights)
            assert await port.outcome(method, request, alice) not in REFUSED, method
            await port.grant(())


async def test_lists_have_what_the_user_may_see(tmp_path: Path) -> None:
    async with users_port(tmp_path) as port:
        alice, root = await port.log_in(), await port.log_in("root")
        await port.served.create("secret")
        start = pb.StartProducerRequest(transactional_id="x", transaction_timeout_ms=60_000)
        await port.call("StartProducer", start, root)
        offsets = [pb.PartitionOffset(topic=topic, partition=0, offset=0) for topic in ("t", "secret")]
        await port.call("CommitOffsets", pb.CommitOffsetsRequest(group="g", offsets=offsets), root)
        app = pb.CommitBatchRequest(app="x", batch_id=1)
        await port.call("CommitBatch", app, root)
        for method, (request, field) in LISTS.items():
            assert not getattr(await port.call(method, request, alice), field), method
        await port.grant(on(SEE) + group(SEE) + txn(SEE) + cluster(SEE))
        for method, (request, field) in LISTS.items():
            assert len(getattr(await port.call(method, request, alice), field)) == 1, method
        described = await port.call("DescribeGroup", pb.DescribeGroupRequest(group="g"), alice)
        assert ([o.topic for o in described.offsets], described.HasField("lag")) == (["t"], False)
        committed = await port.call("FetchOffsets", pb.FetchOffsetsRequest(group="g"), alice)
        assert [o.topic for o in committed.offsets] == ["t"]
        status = await port.call("NodeStatus", pb.NodeStatusRequest(), alice)
        assert ({r.topic for r in status.replicas}, list(status.events)) == ({"t"}, [])
        assert len((await port.call("NodeStatus", pb.NodeStatusRequest(), root)).replicas) == 2
        for name in ("secret", "nothing"):  # the same words for what is there and what is not
            asked = pb.GetPartitionRangeInfoRequest(topic=name, partition=0)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await port.call("GetPartitionRangeInfo", asked, alice)
            assert name in str(refused.value.details())
            assert str(refused.value.details()).startswith("NOT_AUTHORIZED: user 'alice' has no right to describe the")


@pytest.mark.parametrize(
    ("user", "password", "fields"),
    [
        ("alice", "wrong", {}),
        ("stranger", "pencil", {}),
        ("alice", "", {"mechanism": "SCRAM-SHA-256"}),
        ("", "pencil", {}),
    ],
)
async def test_a_login_that_fails_does_not_say_why(tmp_path: Path, user: str, password: str, fields: Any) -> None:
    async with users_port(tmp_path) as port:
        exchange = ClientExchange(BY_NAME[fields.get("mechanism", "SCRAM-SHA-512")], user, password)
        first, call = exchange.first(), port.stub("Users").Login(None)
        await call.write(pb.LoginRequest(mechanism=fields.get("mechanism", "SCRAM-SHA-512"), message=first))

        async def verdict() -> None:
            said = await call.read()
            await call.write(pb.LoginRequest(message=exchange.final(said.message)))
            await call.read()

        refused = await fails(verdict())
        assert (refused.name, refused.message) == (
            "AUTHENTICATION_FAILED",
            "the login has failed: the user or the password is wrong",
        )


async def test_logins_that_fail_do_not_fill_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.coordinator.grpc.login.LOGINS_PER_CONNECTION_MAX", 100)  # a stranger has connections

    async def failed() -> None:
        call = port.stub("Users").Login(None)
        await call.write(pb.LoginRequest(mechanism="SCRAM-SHA-256", message=b"n,,n=alice"))
        assert (await fails(call.read())).name == "AUTHENTICATION_FAILED"

    async with users_port(tmp_path) as port:
        with capture_logs() as logged:
            await asyncio.gather(*(failed() for _ in range(100)))
        assert 0 < sum(entry["event"] == "login_failed" for entry in logged) < 100  # ten a second


async def test_an_unknown_user_is_refused_as_slowly_as_a_known_one(tmp_path: Path) -> None:
    async def took(user: str) -> float:
        began = perf_counter()
        with pytest.raises(grpc.aio.AioRpcError):
            await port.log_in(user, "wrong", mechanism="SCRAM-SHA-256")
        return perf_counter() - began

    async with users_port(tmp_path) as port:
        await took("alice")
        known, unknown = [], []
        for _ in range(5):
            known.append(await took("alice"))
            unknown.append(await took("stranger"))
        assert 0.5 < median(known) / median(unknown) < 2
        assert min(*known, *unknown) > 0.1, "the refusal waits, so that guesses are slow"


@pytest.mark.parametrize("first", [b"", b"n,,n=alice", b"x" * 20_000, b"n,a=root,n=alice,r=abc"])
async def test_a_malformed_login_ends(tmp_path: Path, first: bytes) -> None:
    async with users_port(tmp_path) as port:
        request = pb.LoginRequest(mechanism="SCRAM-SHA-256", message=first)
        assert await port.outcome("Login", request, ()) == "AUTHENTICATION_FAILED"
        plain = pb.LoginRequest(mechanism="PLAIN", message=b"\0alice\0pencil")
        assert await port.outcome("Login", plain, ()) == "INVALID_REQUEST", "a password is never sent"


async def test_a_connection_guesses_no_faster_than_by_kafkas_protocol(tmp_path: Path) -> None:
    guess = pb.LoginRequest(mechanism="SCRAM-SHA-256", message=b"malformed")
    async with users_port(tmp_path) as port:
        began = perf_counter()
        many = [port.outcome("Login", guess, ()) for _ in range(20)]
        found = Counter(await asyncio.gather(*many))
        delays = 1 + (perf_counter() - began) / LOGIN_FAILED_DELAY_S
        assert found["AUTHENTICATION_FAILED"] <= LOGINS_PER_CONNECTION_MAX * delays
        assert found.keys() <= {"AUTHENTICATION_FAILED", "LIMIT_EXCEEDED", "CUT"}
        assert found["LIMIT_EXCEEDED"]
        assert await port.log_in()


async def test_a_token_is_of_its_listener_and_ports_without_users_need_none(tmp_path: Path) -> None:
    other = ListenerConfig(name="other", grpc_address=ANY, sasl=("SCRAM-SHA-256",))
    async with users_port(tmp_path, listeners={"other": other, "outside": OUTSIDE}) as port:
        root = await port.log_in("root")
        assert await port.outcome("ListUsers", pb.ListUsersRequest(), root) == "OK"
        server = port.served.server._grpc
        async with grpc.aio.insecure_channel(format_address(server.bound["other"])) as channel:
            call = smq_pb2_grpc.AdminStub(channel).ListUsers(pb.ListUsersRequest(), metadata=root)
            assert (await fails(call)).name == "LOGIN_NEEDED"
        assert len((await port.served.admin.ListUsers(pb.ListUsersRequest())).users) == 2
        own = smq_pb2_grpc.UsersStub(port.served.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="this port asks for no user"):
            await Token(Login(user="root", password="pencil")).renew(own)


@pytest.mark.parametrize(
    "revoke",
    [
        lambda port: port.change(DeleteUser(name="alice")),
        lambda port: port.change(AlterUser(name="alice", set_=keys("new"), decoy_secret=b"d" * 32)),
        lambda port: port.grant(()),
    ],
    ids=["deleted", "new password", "no right any more"],
)
async def test_the_open_calls_of_a_revoked_user_end_soon(tmp_path: Path, revoke: Callable[[Port], Any]) -> None:
    init = pb.SubscribeInit(**PART, subscription_id="s", offset_type=pb.RESET_TO_EARLIEST)
    poll = pb.FetchRequest(partitions=[pb.FetchPartition(**PART, offset=0)], max_wait_ms=20_000)
    async with users_port(tmp_path) as port:
        await port.grant(on(READ, WRITE))
        alice = await port.log_in()
        subscription = port.stub("Agent").SubscribeRecord(None, metadata=alice)
        await subscription.write(pb.SubscribeRecordRequest(init=init))
        assert (await subscription.read()).started.offset == 0
        fetch = port.stub("Broker").Fetch(poll, metadata=alice)
        publishing = port.stub("Agent").PublishRecord(None, metadata=alice)
        await asyncio.sleep(0.1)  # they wait by then; if not, they are refused
        await revoke(port)
        async with asyncio.timeout(SOON_S):
            for ended in (subscription.read(), fetch):
                assert (await fails(ended)).name in REFUSED
        await asyncio.sleep(USERS_CHECK_S)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # otherwise it refuses by its answers
            await publishing.write(publish_request([b"v"]))
            assert (await publishing.read()).error.name == "NOT_AUTHORIZED"
        info = await port.served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(**PART))
        assert info.next_offset == 0, "nothing was written"


async def test_a_session_ends_and_so_do_its_streams(tmp_path: Path) -> None:
    brief = ListenerConfig(name="outside", grpc_address=ANY, sasl=("SCRAM-SHA-512",), sasl_session_ms=300)
    async with users_port(tmp_path, listeners={"outside": brief}) as port:
        root = await port.log_in("root")
        stream = port.stub("Agent").PublishRecord(None, metadata=root)
        assert (await fails(stream.read())).name == "TIMED_OUT", "what was sent may have been stored"
        assert await port.outcome("ListUsers", pb.ListUsersRequest(), root) == "LOGIN_NEEDED"


async def test_a_users_publishing_session_is_its_own(tmp_path: Path) -> None:
    async with users_port(tmp_path) as port:
        await port.grant(on(WRITE))
        alice, root = await port.log_in(), await port.log_in("root")
        start = pb.StartPublishSessionRequest(session_id="s", topic="t", request_id=b"r" * 16)
        of_root = await port.call("StartPublishSession", start, root)
        taken = await port.outcome("StartPublishSession", start, alice)
        used = await port.outcome("PublishRecord", pb.PublishRecordRequest(session_id="s", partition=0), alice)
        closed = await port.outcome("ClosePublishSession", pb.ClosePublishSessionRequest(session_id="s"), alice)
        assert (taken, used, closed) == ("SESSION_EXISTS", "UNKNOWN_SESSION", "UNKNOWN_SESSION")
        resumed = {"producer_id": of_root.producer_id, "producer_epoch": 0, "resume": True}
        own = await port.call(
            "StartPublishSession", pb.StartPublishSessionRequest(session_id="a", topic="t", **resumed), alice
        )
        assert own.producer_id != of_root.producer_id, "the next epoch of another's id would fence it"


def test_a_client_sends_nothing_of_a_user_without_tls(tmp_path: Path) -> None:
    with pytest.raises(SmqError, match="a login needs TLS"):
        Admin("127.0.0.1:1", login=Login(user="alice", password="pencil"))
    assert "pencil" not in repr(Login(user="alice", password="pencil"))
    file = tmp_path / "password"
    file.write_text("pencil\nsecond line\n")
    file.chmod(0o640)
    with pytest.raises(SmqError, match="others may read the password file"):
        read_password(file)
    file.chmod(0o600)
    assert read_password(file) == "pencil"


def test_a_client_takes_no_node_that_does_not_know_its_keys() -> None:
    exchange = ClientExchange(BY_NAME["SCRAM-SHA-256"], "alice", "pencil", b"abc")
    for said in (
        b"r=abc,s=c2FsdA==,i=4096",
        b"r=xyz,s=c2FsdA==,i=4096",
        b"r=abcd,s=c2FsdA==,i=1",
        b"r=abcd,s=c2FsdA==,i=99999999",
    ):
        with pytest.raises(SmqError, match="does not log users in as it should"):
            exchange.final(said)
    exchange.final(b"r=abcd,s=c2FsdA==,i=4096")
    with pytest.raises(SmqError, match="does not know this user"):
        exchange.check(b"v=AAAA")
