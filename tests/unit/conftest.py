"""Tests that are coroutines, and the node that serves them."""

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import uvloop

from smq.testing.served import Served, served_node

DEADLINE_S: Final = 60  # on a busy machine; most take milliseconds. A hang is a failure


@pytest.fixture
def served(tmp_path: Path) -> AbstractAsyncContextManager[Served]:
    """A real node with its services: the test gets what this context yields."""
    return served_node(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test has an event loop of its own, in which arguments that are asynchronous contexts are entered.
    A node has uvloop's, as in production; clients have asyncio's, as most of their users do."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    contexts = {name: value for name, value in given.items() if isinstance(value, AbstractAsyncContextManager)}

    async def entered() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            found = {name: await stack.enter_async_context(context) for name, context in contexts.items()}
            await test(**given | found)

    is_client = "clients" in pyfuncitem.path.parts and not contexts
    with asyncio.Runner(loop_factory=asyncio.new_event_loop if is_client else uvloop.new_event_loop) as runner:
        runner.run(entered())
    return True
