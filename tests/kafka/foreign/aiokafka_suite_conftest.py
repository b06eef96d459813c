"""In place of the conftest of aiokafka's own tests: a broker that runs already, at SERVER, instead of docker."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from . import _testutil  # type: ignore[attr-defined] # beside this file once it lies in their directory


@pytest.fixture(scope="class")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    yield made
    made.close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="class")
def setup_test_class_serverless(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> None:
    request.cls.loop = loop


@pytest.fixture(scope="class")
def setup_test_class(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> None:
    server = os.environ["SERVER"]
    host, _, port = server.rpartition(":")
    given = {"loop": loop, "kafka_host": host, "kafka_port": int(port), "hosts": [server], "kafka_version": "2.8.1"}
    for name, value in given.items():
        setattr(request.cls, name, value)


_BASE: Any = _testutil.KafkaIntegrationTestCase
_set_up, _wait_topic = _BASE.setUp, _BASE.wait_topic


async def _create(case: Any, topic: str) -> None:
    """Their broker makes topics of two partitions when they are first named; ours makes them of one."""
    admin = AIOKafkaAdminClient(bootstrap_servers=case.hosts)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 2, 1)])
    await admin.close()


def _with_topic(case: Any) -> None:
    _set_up(case)
    if type(case).__name__ != "TestAdmin":  # which creates its topics itself
        case.loop.run_until_complete(_create(case, case.topic))


async def _with_wait(case: Any, client: Any, topic: str) -> None:
    await _create(case, topic)
    await _wait_topic(case, client, topic)


_BASE.setUp, _BASE.wait_topic = _with_topic, _with_wait
