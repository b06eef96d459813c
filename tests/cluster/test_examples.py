"""examples/offsets.py, web_service.py and grpc-go on three nodes, as their users start or import them."""

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from examples.offsets import ImageLog
from examples.web_service import application
from smq.clients import Admin, OffsetAssigner
from smq.testing.cluster import Cluster
from smq.testing.loops import run
from tests.kafka.foreign.clients import Missing
from tests.kafka.foreign.clients import run as build
from tests.pages import ROOT

Web = TestClient[Any, Any]


# --------------------------------------------------------------------------------------------------- offsets
def test_the_program_gives_each_image_an_offset_and_goes_on_where_it_ended(cluster: Cluster, tmp_path: Path) -> None:
    images = [tmp_path / f"{name}.png" for name in "abc"]
    for number, image in enumerate(images, 1):
        image.write_bytes(b"x" * number)

    def shown(*given: Path) -> list[str]:
        options = ["--servers", cluster.servers, str(tmp_path / "log"), *map(str, given)]
        command = [sys.executable, "-m", "examples.offsets", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = shown(*images)
    sizes = {image.name: len(image.read_bytes()) for image in images}
    given = dict(line.split(" has offset ") for line in first[:3])
    assert given.keys() == sizes.keys()
    assert first[3:] == sorted(f"{offset}: {sizes[name]} bytes" for name, offset in given.items())
    assert shown(images[0]) == ["a.png has offset 3", *first[3:], "3: 1 bytes"]


class UnluckyLog(ImageLog):
    """On a disk that is slow with one image, and full for another."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.is_slow, self.is_free = threading.Event(), threading.Event()

    def _write(self, offset: int, image: bytes) -> None:
        if image == b"slow":
            self.is_slow.set()
            assert self.is_free.wait(30)
        if image == b"large":
            raise OSError("no space left")
        super()._write(offset, image)


def test_readers_wait_for_an_earlier_image_and_pass_over_what_was_given_up(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario(topic: str) -> None:
        async with Admin(cluster.servers) as admin, OffsetAssigner(cluster.servers) as assigner:
            await admin.create_topic(topic, 1, config={"storage": "external"})
            await assigner.assign(topic, 0, 2)  # by a writer that has died
            log = UnluckyLog(tmp_path, topic, 0, admin, assigner)
            await log.start_writing()
            slow = asyncio.create_task(log.append(b"slow"))
            await asyncio.to_thread(log.is_slow.wait, 30)
            assert await log.append(b"quick") == 3
            assert [found async for found in log.read()] == []
            log.is_free.set()
            assert await slow == 2
            assert [found async for found in log.read()] == [(2, b"slow"), (3, b"quick")]
            with pytest.raises(OSError, match="no space"):
                await log.append(b"large")
            assert await log.append(b"small") == 5
            assert [found async for found in log.read(3)] == [(3, b"quick"), (5, b"small")]

    run(scenario(f"images-{secrets.token_hex(4)}"))


# ----------------------------------------------------------------------------------------------- web service
def with_service(cluster: Cluster, body: Callable[[Web], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with TestClient(TestServer(application(cluster.servers))) as web:
            await body(web)

    run(scenario())


def test_what_is_posted_is_read_page_by_page(cluster: Cluster) -> None:
    topic = cluster.make_topic()

    async def body(web: Web) -> None:
        for number in range(5):
            answer = await web.post(f"/topics/{topic}?key=me", data=f"record {number}")
            assert (answer.status, await answer.json()) == (201, {"partition": 0, "offset": number})
        assert (await web.post(f"/topics/{topic}", data=b"\xff\x00")).status == 201
        first = await (await web.get(f"/topics/{topic}/0?limit=3")).json()
        assert [(r["offset"], r["key"], r["value"]) for r in first["records"]] == [
            (number, "me", f"record {number}") for number in range(3)
        ]
        assert first["next_offset"] == 3
        rest = await (await web.get(f"/topics/{topic}/0?offset=3")).json()
        assert [r.get("value", r.get("value_base64")) for r in rest["records"]] == ["record 3", "record 4", "/wA="]
        assert "key" not in rest["records"][2]
        end = await (await web.get(f"/topics/{topic}/0?offset={rest['next_offset']}")).json()
        assert end == {"records": [], "next_offset": 6}

    with_service(cluster, body)


def test_a_follower_gets_what_is_there_and_then_what_comes(cluster: Cluster) -> None:
    topic = cluster.make_topic()

    async def body(web: Web) -> None:
        await web.post(f"/topics/{topic}", data="before")
        await web.post(f"/topics/{topic}", data="there")
        async with web.get(f"/topics/{topic}/0/follow?offset=1") as answer:
            assert json.loads(await answer.content.readline())["value"] == "there"
            for number in range(3):
                await web.post(f"/topics/{topic}", data=f"new {number}")
                found = json.loads(await answer.content.readline())
                assert (found["offset"], found["value"]) == (number + 2, f"new {number}")

    with_service(cluster, body)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/topics/nowhere/0", 404, "UNKNOWN_TOPIC"),
        ("/topics/nowhere/0/follow", 404, "UNKNOWN_TOPIC"),
        ("/topics/TOPIC/7", 404, "UNKNOWN_PARTITION"),
        ("/topics/TOPIC/0?offset=1", 416, "OFFSET_OUT_OF_RANGE"),
        ("/topics/TOPIC/0/follow?offset=1", 416, "OFFSET_OUT_OF_RANGE"),
        ("/topics/TOPIC/0?offset=x", 400, "INVALID_REQUEST"),
        ("/topics/TOPIC/0?limit=-1", 400, "INVALID_REQUEST"),
        ("/topics/TOPIC/x", 400, "INVALID_REQUEST"),
    ],
)
def test_a_request_that_cannot_be_served_gets_a_status_and_the_error(
    cluster: Cluster, path: str, status: int, error: str
) -> None:
    topic = cluster.make_topic()

    async def body(web: Web) -> None:
        answer = await web.get(path.replace("TOPIC", topic))
        found = await answer.json()
        assert (answer.status, found["error"], found["definite"]) == (status, error, True)

    with_service(cluster, body)


# --------------------------------------------------------------------------------------------------- gRPC, Go
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_go_program_publishes_and_reads_over_grpc(cluster: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "examples/grpc-go"
    shutil.copytree(ROOT / "examples/grpc-go", directory, ignore=shutil.ignore_patterns("smqpb"))
    shutil.copytree(ROOT / "smq/clients/proto", tmp_path / "smq/clients/proto")
    try:
        build(directory, "env", f"PROTOC={sys.executable} -m grpc_tools.protoc", "./generate.sh")
        build(directory, "go", "build", "-o", "events", ".")
    except Missing as e:
        pytest.skip(f"Go: {e}")
    topic, server = f"events-{secrets.token_hex(4)}", cluster.nodes[1].grpc
    for first in (0, 3):
        done = subprocess.run(
            [str(directory / "events"), server, topic], capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 0, done.stderr
        values = [f"{first + n} job-7: {value}" for n, value in enumerate(("started", "changed", "ended"))]
        assert done.stdout.splitlines() == [f"stored at {first} to {first + 2}", *values]
