"""The Users service: the login of a user, which is the one call that needs no token.

Owns the steps of a login, and what a stranger learns of one that fails: nothing but that, after the same time for a
wrong password and an unknown user. Only the composition root imports it.
"""

import asyncio
from collections.abc import AsyncIterable
from typing import Final

from smq.clients import scram
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.grpc.gate import host_of
from smq.coordinator.grpc.open_streams import StreamCounts
from smq.coordinator.grpc.service import Context, Service, guarded
from smq.coordinator.limits import LOGIN_FAILED_DELAY_S, LOGIN_S_MAX, LOGINS_PER_CONNECTION_MAX, SASL_TOKEN_BYTES_MAX
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.scram_exchange import LoginFailed, ScramExchange
from smq.coordinator.service.users import FAILED_LOGINS, Users
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import NodeApi

_FAILED: Final = "the login has failed: the user or the password is wrong"


class LoginService(Service, smq_pb2_grpc.UsersServicer):
    def __init__(self, node: NodeApi, users: Users) -> None:
        self.audience = Audience(node=node)
        self._users = users
        self._logins = StreamCounts("login", LOGINS_PER_CONNECTION_MAX)

    @guarded
    async def Login(  # type: ignore[override] # a coroutine that writes to the context, as grpc.aio allows
        self, request: AsyncIterable[pb.LoginRequest], context: Context
    ) -> None:
        if not self.gate.mechanisms:
            message = "this port asks for no user: connect without one, and show a certificate if it asks for that"
            raise SmqError(ErrorCode.INVALID_REQUEST, message)
        with self._logins.one_more(context.peer()):  # also while a refusal waits
            await self._verdict(request, context)

    async def _verdict(self, requests: AsyncIterable[pb.LoginRequest], context: Context) -> None:
        try:
            async with asyncio.timeout(LOGIN_S_MAX):
                await self._exchange(requests, context)
        except TimeoutError:
            raise SmqError(ErrorCode.AUTHENTICATION_FAILED, f"no user was proven within {LOGIN_S_MAX} s") from None
        except LoginFailed as e:
            FAILED_LOGINS.warn("login_failed", purpose="gRPC", address=host_of(context.peer()), reason=str(e))
            await asyncio.sleep(LOGIN_FAILED_DELAY_S)
            raise SmqError(ErrorCode.AUTHENTICATION_FAILED, _FAILED) from None

    async def _exchange(self, requests: AsyncIterable[pb.LoginRequest], context: Context) -> None:
        exchange: ScramExchange | None = None
        async for request in requests:
            if exchange is None:
                if request.mechanism not in self.gate.mechanisms:
                    known = ", ".join(self.gate.mechanisms)
                    message = f"mechanism {request.mechanism[:80]!r} is none of this port's: {known}"
                    raise SmqError(ErrorCode.INVALID_REQUEST, message)
                exchange = ScramExchange(self._users, scram.BY_NAME[request.mechanism])
            if len(request.message) > SASL_TOKEN_BYTES_MAX:
                raise LoginFailed(f"a message of {len(request.message)} bytes")
            answer = pb.LoginResponse(message=await exchange.step(request.message))
            if exchange.proven is not None:
                answer.token, answer.lifetime_ms = self.gate.open(exchange.proven)
            await context.write(answer)
            if exchange.proven is not None:
                return
        raise LoginFailed("the client ended it")
