"""A web service over topics: POST publishes a record, GET reads from an offset, or follows what is published.

    python -m examples.web_service 127.0.0.1:7401

    curl -d hello 'http://127.0.0.1:8080/topics/greetings?key=me'
    curl 'http://127.0.0.1:8080/topics/greetings/0?offset=0&limit=100'
    curl -N 'http://127.0.0.1:8080/topics/greetings/0/follow?offset=0'

One producer and one consumer serve all requests. A reader keeps its own place: the offset that it asks for next is in
the answer, so it can ask any process of the service.
"""

import base64
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from smq.clients import Consumer, ConsumerRecord, ErrorCode, Producer, RecordFilter, SmqError

PRODUCER: Final = web.AppKey("producer", Producer)
CONSUMER: Final = web.AppKey("consumer", Consumer)
LIMIT_DEFAULT, LIMIT_MAX = 100, 1_000  # records of one answer
STATUS: Final = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_TOPIC_NAME: 400,
    ErrorCode.UNKNOWN_TOPIC: 404,
    ErrorCode.UNKNOWN_PARTITION: 404,
    ErrorCode.BATCH_TOO_LARGE: 413,
    ErrorCode.OFFSET_OUT_OF_RANGE: 416,
}
routes = web.RouteTableDef()


@routes.post("/topics/{topic}")
async def publish(request: web.Request) -> web.Response:
    """Answers once the record is acknowledged: a majority has it on disk."""
    producer, key = request.app[PRODUCER], request.query.get("key")
    await producer.wait_room()
    sent = producer.send(request.match_info["topic"], await request.read(), None if key is None else key.encode())
    place = await sent
    return web.json_response({"partition": place.partition, "offset": place.offset}, status=201)


@routes.get("/topics/{topic}/{partition}")
async def read(request: web.Request) -> web.Response:
    """Up to `limit` records from `offset` on. Fewer than that if there are no more, and none at the end."""
    page = await request.app[CONSUMER].search_page(
        *place_of(request),
        RecordFilter(),
        start=number(request, "offset", 0),
        max_records=min(number(request, "limit", LIMIT_DEFAULT), LIMIT_MAX),
    )
    return web.json_response({"records": [shown(record) for record in page.records], "next_offset": page.next_offset})


@routes.get("/topics/{topic}/{partition}/follow")
async def follow(request: web.Request) -> web.StreamResponse:
    """Records from `offset` on, one JSON object per line, and then the new ones until the caller goes."""
    consumer, place = request.app[CONSUMER], place_of(request)
    page = await consumer.search_page(*place, RecordFilter(), start=number(request, "offset", 0))
    answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await answer.prepare(request)
    for record in page.records:
        await answer.write(line(shown(record)))
    try:
        async for record in consumer.search(*place, RecordFilter(), start=page.next_offset, follow=True):
            await answer.write(line(shown(record)))
    except SmqError as e:
        await answer.write(line(error(e)))  # it is too late for another status
    return answer


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except SmqError as e:
        return web.json_response(error(e), status=STATUS.get(e.code, 503 if e.code.is_retriable else 500))


def error(e: SmqError) -> dict[str, Any]:
    """If it is not definite, the record may have been stored: a repeated POST may store it twice."""
    return {"error": e.code.name, "message": str(e), "definite": e.code.is_definite}


def place_of(request: web.Request) -> tuple[str, int]:
    try:
        return request.match_info["topic"], int(request.match_info["partition"])
    except ValueError:
        raise SmqError(ErrorCode.INVALID_REQUEST, "the partition must be a number") from None


def number(request: web.Request, name: str, default: int) -> int:
    try:
        return int(request.query.get(name, default))
    except ValueError:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} must be a number") from None


def shown(record: ConsumerRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"offset": record.offset, "timestamp_ms": record.timestamp_ms}
    for name, data in (("key", record.key), ("value", record.value)):
        if data is not None:
            found |= as_text(name, data)
    return found


def as_text(name: str, data: bytes) -> dict[str, str]:
    """JSON has no bytes: what is not UTF-8 has another name."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def line(found: dict[str, Any]) -> bytes:
    return json.dumps(found).encode() + b"\n"


def application(servers: str) -> web.Application:
    async def clients(app: web.Application) -> AsyncIterator[None]:
        async with Producer(servers) as app[PRODUCER], Consumer(servers) as app[CONSUMER]:
            yield

    app = web.Application(middlewares=[errors_as_json])
    app.add_routes(routes)
    app.cleanup_ctx.append(clients)
    return app


if __name__ == "__main__":
    web.run_app(application(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7401"), host="127.0.0.1", port=8080)
