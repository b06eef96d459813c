"""Kafka clients of any language behind one interface: a process that takes JSON lines and answers each with one.

Owns the protocol. A request is an object with `op` and the arguments of that operation; an answer has its results, or
`error`. Operations, all on partition 0:

- `hello` -> `version`, and the `codecs` that the client can write; `is_timed` is false if it cannot set timestamps;
- `create` topic, partitions;
- `produce` topic, codec, records;
- `read` topic, count -> `records` from the beginning;
- `group` topic, group, count -> the next `records` for the group, committed up to the last of them;
- `time` topic, timestamp -> `records`: the first at or after that time, found by the client's own look-up;
- `transact` topic, `committed` topic, count -> `records`: see `Client`; `is_transactional` of `hello` is false if the
  client has no transactional producer;
- `tools` topic, `commits` topic, partitions, count, `copy` topic, target, group, partitions, count: see `Client`.

A record has `k`ey and `v`alue (base64 or null), `t`imestamp in milliseconds, `h`eaders (pairs of a name and base64),
and, if it was read, its `o`ffset.
"""

import base64
import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kafka.client_adapters import Item

ANSWER_S = 90.0  # a group's first join waits for more members, on a busy machine for longer
COPY_S = 400.0  # through several deaths


def packed(item: Item, offset: int | None = None) -> dict[str, Any]:
    """A record as the protocol writes it."""
    return {
        "k": _text(item.key),
        "v": _text(item.value),
        "t": item.timestamp_ms,
        "h": [[name, _text(value)] for name, value in item.headers],
        "o": offset,
    }


def unpacked(record: dict[str, Any]) -> Item:
    headers = tuple((name, _data(value) or b"") for name, value in record["h"] or ())
    return Item(_data(record["k"]), _data(record["v"]), record["t"], headers)


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _data(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def serve(operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """The other side of `Client`, for drivers that are written in Python."""
    import sys

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = operations[request["op"]](request)
        except Exception as e:  # noqa: BLE001 - the test gets any error as the answer
            answer = {"error": f"{type(e).__name__}: {e}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Client:
    """A driver's process."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert self._process.stdout is not None
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        hello = self._ask("hello")
        self.version: str = hello["version"]
        self.codecs: list[str] = hello["codecs"]
        self.is_timed: bool = hello.get("is_timed", True)
        self.is_transactional: bool = hello.get("is_transactional", True)

    def kill(self) -> None:
        """SIGKILL; a thread that waits for an answer gets an AssertionError."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """A driver stops at the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()

    def create(self, topic: str, partitions: int = 1) -> None:
        self._ask("create", topic=topic, partitions=partitions)

    def produce(self, topic: str, codec: str, items: Sequence[Item]) -> None:
        self._ask("produce", topic=topic, codec=codec, records=[packed(item) for item in items])

    def read(self, topic: str, count: int) -> list[Item]:
        """From the beginning; their offsets are their places."""
        found = self._ask("read", topic=topic, count=count)["records"]
        assert [record["o"] for record in found] == list(range(count))
        return [unpacked(record) for record in found]

    def group(self, topic: str, group: str, count: int) -> list[int]:
        """The offsets that the group was given."""
        return [record["o"] for record in self._ask("group", topic=topic, group=group, count=count)["records"]]

    def at_time(self, topic: str, timestamp_ms: int) -> int:
        """The offset of the record that the client finds there."""
        (found,) = self._ask("time", topic=topic, timestamp=timestamp_ms)["records"]
        return int(found["o"])

    def tools(self, topic: str) -> dict[str, Any]:
        """What the client's administration tools show of the cluster and of the topic. Java only."""
        return self._ask("tools", topic=topic)

    def transact(self, topic: str) -> str:
        """Commits "0" and "2" and aborts "1", each with its number as the offset of `group-TOPIC` in its topic; the
        error of its producer once another one of its id has fenced it, or "none"."""
        return str(self._ask("transact", topic=topic)["failure"])

    def committed(self, topic: str, count: int) -> list[bytes | None]:
        """The first values that a reader of committed records gets."""
        return [unpacked(record).value for record in self._ask("committed", topic=topic, count=count)["records"]]

    def commits(self, topic: str, partitions: int, count: int) -> list[int]:
        """Transactions 0 to count - 1, each with its number to every partition, every third aborted; which of them have
        failed. Java and franz-go only."""
        return list(self._ask("commits", topic=topic, partitions=partitions, count=count)["failed"])

    def copy(self, topic: str, target: str, group: str, partitions: int, count: int) -> dict[str, int]:
        """Copies each record, with "copy of " before its value, to the same partition of the target, ten or fewer in a
        transaction with the group's offsets, until the group has `count` committed in each partition. Every fifth
        transaction is aborted, and its records are copied again. After an error a new producer and a new consumer go
        on. How many were `aborted`, and how often it has `failed`. confluent-kafka, Java and franz-go only."""
        asked = {"topic": topic, "target": target, "group": group, "partitions": partitions, "count": count}
        return dict(self._ask("copy", COPY_S, **asked))

    def _ask(self, op: str, answer_s: float = ANSWER_S, /, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_line` reports how it ended
        answer: dict[str, Any] = json.loads(self._line(op, answer_s))
        if "error" in answer:
            raise AssertionError(f"{self.name}: {op}: {answer['error']}\n{self._tail()}")
        return answer

    def _line(self, op: str, answer_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + answer_s
        while b"\n" not in self._rest:
            ready = self._selector.select(max(0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not data:
                why = "ended" if ready else f"did not answer within {answer_s:.0f} s"
                raise AssertionError(f"{self.name}: {op}: the driver {why}\n{self._tail()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]
